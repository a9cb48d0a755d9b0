/* The file that holds the fake driver's state: mapping, locking, faults. */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
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
    struct fake_state *mapped;
    int file;

    if (state)
        return state;
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
    if (mapped->magic != FAKE_MAGIC || mapped->version != FAKE_VERSION ||
        mapped->size != sizeof(*state)) {
        munmap(mapped, sizeof(*state));
        return refuse("not a state of the version that this library was built for");
    }
    return state = mapped;
}

/* A descriptor of its own for each lock: so flock keeps out threads and forked children, too,
 * and the kernel frees it when the holder dies. */
int fake_lock(void)
{
    int file = open(path(), O_RDWR | O_CLOEXEC);

    while (file >= 0 && flock(file, LOCK_EX) && errno == EINTR)
        ;
    return file;
}

void fake_unlock(int lock)
{
    if (lock < 0)
        return;
    flock(lock, LOCK_UN);
    close(lock);
}

static int matches(const struct fake_fault *fault, const char *function, int gpu)
{
    int starts = !strncmp(function, "nvmlInit", 8) || !strcmp(function, "nvmlShutdown");

    if (fault->gpu >= 0 && fault->gpu != gpu)
        return 0;
    return !strcmp(fault->function, function) || (!starts && !strcmp(fault->function, "*"));
}

int fake_fault(const char *function, int gpu)
{
    int lock = fake_lock(), code = FAKE_OK;

    for (uint32_t i = 0; i < state->fault_count && i < FAKE_FAULTS; i++) {
        struct fake_fault *fault = &state->faults[i];
        if (!matches(fault, function, gpu))
            continue;
        if (fault->calls++ >= fault->after && !code)
            code = fault->code;
    }
    fake_unlock(lock);
    return code;
}
