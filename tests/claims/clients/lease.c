/* A client of gpuaff's lease protocol in another language: docs/lease-protocol.md is all it knows.

       lease LOCK_DIRECTORY UUID [DIRECTORY_IN_SYSFS]

   Takes the guard, leases the GPU, takes a slot of the registry as its holder, gives the guard back and says
   "has it"; or says "busy" and ends with 75. Holds the lease until its standard input ends. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SLOTS = 512, SLOT_SIZE = 4096, RECORDS = 2 * 8 * SLOTS,
       WAITS = RECORDS + SLOTS * SLOT_SIZE, HOLDS = WAITS + SLOTS,
       PARTS = HOLDS + SLOTS, PART_COUNT = 64 };

static const char *folder;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static int open_existing(const char *path, int flags)
{
    int handle = open(path, flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW);
    struct stat found;
    if (handle >= 0 && (fstat(handle, &found) || !S_ISREG(found.st_mode) || found.st_nlink > 1)) {
        errno = EINVAL;
        fail(path);
    }
    return handle;
}

static void make(const char *path, long size)
{
    int handle = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 01666);
    if (handle < 0 && errno == EEXIST)
        return; /* another process was first */
    if (handle < 0 || fchmod(handle, 01666) || (size && posix_fallocate(handle, 0, size)))
        fail(path);
    close(handle);
}

static int open_lock(const char *name, int flags, long size)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int handle = open_existing(path, flags);
    if (handle < 0 && errno == ENOENT) {
        make(path, size);
        handle = open_existing(path, flags);
    }
    if (handle < 0)
        fail(path);
    return handle;
}

static int ofd(int handle, int command, short type, long start, struct flock *found)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = 1};
    int failed = fcntl(handle, command, &lock);
    *found = lock;
    return failed;
}

/* Whether somebody else has any of these bytes. */
static int in_use(int handle, long start, long length)
{
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
    if (fcntl(handle, F_OFD_GETLK, &lock))
        fail("registry");
    return lock.l_type != F_UNLCK;
}

static long started(void) /* field 22 of /proc/self/stat */
{
    char text[4096] = "";
    FILE *file = fopen("/proc/self/stat", "r");
    if (!file || !fgets(text, sizeof text, file))
        fail("/proc/self/stat");
    fclose(file);
    char *field = strrchr(text, ')') + 2;
    for (int number = 3; number < 22; number++)
        field = strchr(field, ' ') + 1;
    return atol(field);
}

static void take_slot(const char *uuid)
{
    int registry = open_lock("registry", O_RDWR, WAITS);
    struct flock found;
    for (long slot = 0; slot < SLOTS; slot++) {
        if (ofd(registry, F_OFD_SETLK, F_WRLCK, WAITS + slot, &found))
            continue;
        if (!in_use(registry, HOLDS + slot, 1) &&
            !in_use(registry, PARTS + slot * PART_COUNT, PART_COUNT)) {
            char record[SLOT_SIZE + 1], text[SLOT_SIZE];
            snprintf(text, sizeof text,
                     "{\"v\": 2, \"pid\": %d, \"start\": %ld, \"uid\": %d, \"name\": \"lease.c\","
                     " \"gpus\": [\"%s\"]}", getpid(), started(), geteuid(), uuid);
            snprintf(record, sizeof record, "%-*s", SLOT_SIZE, text);
            if (pwrite(registry, record, SLOT_SIZE, RECORDS + slot * SLOT_SIZE) != SLOT_SIZE)
                fail("registry");
            ofd(registry, F_OFD_SETLK, F_WRLCK, HOLDS + slot, &found);
            ofd(registry, F_OFD_SETLK, F_UNLCK, WAITS + slot, &found);
            return; /* the descriptor stays open: it is what holds the slot */
        }
        ofd(registry, F_OFD_SETLK, F_UNLCK, WAITS + slot, &found);
    }
    fprintf(stderr, "the registry is full\n");
    exit(1);
}

int main(int count, char **arguments)
{
    char name[256];
    if (count < 3)
        return 2;
    folder = arguments[1];
    int guard = open_lock("guard", O_RDONLY, 0);
    if (flock(guard, LOCK_EX))
        fail("guard");
    if (count > 3) {
        int directory = open(arguments[3], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (directory < 0)
            fail(arguments[3]);
        if (flock(directory, LOCK_EX | LOCK_NB))
            return puts("busy"), 75;
    }
    snprintf(name, sizeof name, "gpu-%s", arguments[2]);
    int file = open_lock(name, O_RDONLY, 0);
    if (flock(file, LOCK_EX | LOCK_NB))
        return puts("busy"), 75;
    take_slot(arguments[2]);
    flock(guard, LOCK_UN);
    puts("has it");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}
