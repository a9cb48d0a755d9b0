/* The file that holds the fake driver's state: mapping, locking, faults. */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct fake_state *state;

static const char *path(void)
{
    const char *named = getenv("GPUAFF_FAKE_STATE");
    return named ? named : "";
}

static struct fake_state *refuse(const char *why)
{
    fprintf(stderr, "fake driver: GPUAFF_FAKE_STATE=%s: %s\n", path(), why);
    return NULL;
}

struct fake_state *fake_open(void)
{
    struct stat status;
    struct fake_state *mapped, *first;
    int file;

    first = __atomic_load_n(&state, __ATOMIC_ACQUIRE);
    if (first)
        return first;
    file = open(path(), O_RDWR | O_CLOEXEC);
    if (file < 0)
        return refuse(strerror(errno));
    if (fstat(file, &status) || status.st_size != (off_t)sizeof(*state)) {
        close(file);
        return refuse("not of the size that this library was built for");
    }
    mapped = mmap(NULL, sizeof(*state), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        return refuse(strerror(errno));
    /* NVML may be started by two threads at once. Both must use one mapping: handles point into
     * it, and would mean nothing in another. */
    first = NULL;
    if (!__atomic_compare_exchange_n(&state, &first, mapped, 0, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        munmap(mapped, sizeof(*state));
        return first;
    }
    return mapped;
}

/* One thread of a process at a time, also of both libraries: who stops the process has this, so
 * that no other thread of it has the state's lock then, which all others would wait for. */
static int alone(int file, short kind)
{
    static uint64_t space;
    struct flock byte = {.l_type = kind, .l_whence = SEEK_SET, .l_len = 1};

    if (!space) /* no process of the tests goes from one namespace to another */
        space = fake_namespace();
    byte.l_start = FAKE_PROCESS_BYTE(space, getpid());
    while (fcntl(file, F_OFD_SETLKW, &byte))
        if (errno != EINTR)
            return -1;
    return 0;
}

static int open_alone(void)
{
    int file = open(path(), O_RDWR | O_CLOEXEC);

    if (file >= 0 && alone(file, F_WRLCK))
        perror("fake driver: the lock of a process");
    return file;
}

static void close_alone(int file)
{
    alone(file, F_UNLCK); /* a child that is forked meanwhile has the file, too */
    close(file);
}

/* A descriptor of its own for each lock: so flock keeps out threads and forked children, too,
 * and the kernel frees it when the holder dies. */
int fake_lock(void)
{
    int file = open_alone();

    while (file >= 0 && flock(file, LOCK_EX) && errno == EINTR)
        ;
    return file;
}

void fake_unlock(int lock)
{
    if (lock < 0)
        return;
    flock(lock, LOCK_UN);
    close_alone(lock);
}

/* This very thread is the one to get the signal, and so does not come back before it goes on. */
static void stop(void)
{
    int file = open_alone();

    syscall(SYS_tgkill, getpid(), gettid(), SIGSTOP);
    if (file >= 0)
        close_alone(file);
}

/* ---- faults ---------------------------------------------------------------------------- */

static int names(const char *pattern, const char *function)
{
    size_t length = strlen(pattern);
    int starts = !strncmp(function, "nvmlInit", 8) || !strcmp(function, "nvmlShutdown");

    if (!strcmp(pattern, "*"))
        return !starts && !strncmp(function, "nvml", 4);
    if (length && pattern[length - 1] == '*')
        return !strncmp(pattern, function, length - 1);
    return !strcmp(pattern, function);
}

static int matches(const struct fake_fault *fault, const char *function, int gpu)
{
    if (fault->gpu >= 0 && fault->gpu != gpu)
        return 0;
    if (fault->pid && fault->pid != (uint32_t)getpid())
        return 0;
    return names(fault->function, function);
}

static int is_due(struct fake_fault *fault)
{
    uint32_t call = fault->calls++;

    if (call < fault->after || (fault->times && call - fault->after >= fault->times))
        return 0;
    return fault->code || fault->action;
}

static void wait_ms(uint32_t ms)
{
    struct timespec left = {ms / 1000, (long)(ms % 1000) * 1000000};

    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

/* A hanging driver lets no handler of Python's run, and so is not interrupted: as the real one. */
static int act(const struct fake_fault *fault)
{
    switch (fault->action) {
    case FAKE_HANG:
        if (fault->ms)
            wait_ms(fault->ms);
        else
            for (;;)
                pause();
        break;
    case FAKE_KILL:
        kill(getpid(), SIGKILL);
        for (;;)
            pause();
    case FAKE_STOP:
        stop();
        break;
    }
    return fault->code;
}

int fake_fault(const char *function, int gpu)
{
    struct fake_fault due = {.code = FAKE_OK};
    int lock, found = 0;

    if (!state->fault_count)
        return FAKE_OK;
    lock = fake_lock();
    for (uint32_t i = 0; i < state->fault_count && i < FAKE_FAULTS; i++) {
        struct fake_fault *fault = &state->faults[i];
        if (matches(fault, function, gpu) && is_due(fault) && !found) {
            due = *fault;
            found = 1;
        }
    }
    fake_unlock(lock);
    return found ? act(&due) : FAKE_OK;
}

/* ---- processes ------------------------------------------------------------------------- */

uint64_t fake_now(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint64_t fake_namespace(void)
{
    struct stat status;

    return stat("/proc/self/ns/pid", &status) ? 0 : status.st_ino;
}

int fake_at_home(void)
{
    return fake_namespace() == state->pid_namespace;
}

uint64_t fake_start(uint32_t pid)
{
    char text[1024], *rest;
    unsigned long long start = 0;
    char how;
    ssize_t length;
    int file;

    snprintf(text, sizeof(text), "/proc/%u/stat", pid);
    file = open(text, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    length = read(file, text, sizeof(text) - 1);
    close(file);
    if (length <= 0)
        return 0;
    text[length] = 0;
    rest = strrchr(text, ')'); /* the name before may hold anything */
    if (!rest || sscanf(rest, ") %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d "
                              "%*d %*d %*d %llu", &how, &start) != 2)
        return 0;
    return how == 'Z' || how == 'X' ? 0 : start;
}

static int is_open(int lock, const struct fake_process *process)
{
    struct flock asked = {.l_type = F_WRLCK, .l_whence = SEEK_SET,
                          .l_start = FAKE_BYTE(process->lock), .l_len = 1};

    return !fcntl(lock, F_OFD_GETLK, &asked) && asked.l_type != F_UNLCK;
}

/* Whether what it has on the GPU is gone; where it is not, whether it is listed is noted. */
static int is_gone(int lock, int home, struct fake_process *process)
{
    int dead = home && process->start && fake_start(process->pid) != process->start;

    if (!process->lock)
        return dead;
    if (home)
        process->unlisted = dead;
    return !is_open(lock, process);
}

void fake_remove(uint32_t place)
{
    struct fake_process *at = &state->processes[place];

    memmove(at, at + 1, (--state->process_count - place) * sizeof(*at));
}

/* When a process died is not known, only when it was seen to be dead: the dead linger from then
 * on, and listed. A real driver takes 100 to 150 ms from the death on. */
void fake_sweep(int lock, uint32_t gpu)
{
    uint64_t now = fake_now();
    int home = state->process_count && fake_at_home();

    for (uint32_t i = state->process_count; i-- > 0;) {
        struct fake_process *process = &state->processes[i];
        if (process->gpu != gpu || !is_gone(lock, home, process))
            continue;
        process->unlisted = 0;
        if (!process->noticed)
            process->noticed = now;
        if (now - process->noticed >= (uint64_t)state->linger_ms * 1000000)
            fake_remove(i);
    }
}

/* ---- memory ---------------------------------------------------------------------------- */

uint64_t fake_total(uint32_t gpu, int32_t slot)
{
    const struct fake_gpu *at = &state->gpus[gpu];

    return slot < 0 || !at->mig_slots ? at->memory : at->memory / at->mig_slots;
}

uint64_t fake_reserved(uint32_t gpu, int32_t slot)
{
    return slot < 0 ? state->gpus[gpu].reserved : 0;
}

uint64_t fake_used(uint32_t gpu, int32_t slot)
{
    const struct fake_gpu *at = &state->gpus[gpu];
    uint64_t used = slot < 0 ? at->idle + at->unexplained : at->slots_used[slot];
    uint64_t most = fake_total(gpu, slot) - fake_reserved(gpu, slot);

    for (int i = 0; slot < 0 && i < FAKE_MIG_SLOTS; i++)
        used += at->slots_used[i];
    for (uint32_t i = 0; i < state->process_count; i++) {
        const struct fake_process *process = &state->processes[i];
        if (process->gpu == gpu && (slot < 0 || process->slot == slot))
            used += process->memory;
    }
    return used < most ? used : most;
}
