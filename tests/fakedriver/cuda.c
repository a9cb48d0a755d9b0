/* A fake libcuda.so.1: the driver API's start, devices and contexts, over the machine that
 * state.h describes.
 *
 * What it does is what the real driver was seen to do (580.159.04): the devices of a process are
 * those that CUDA_VISIBLE_DEVICES names at cuInit and no others later; in a forked child of a
 * process that has started CUDA every call says "not initialized", cuInit too; a context is in
 * NVML's list at once, with 518 MiB. It computes nothing.
 *
 * Not observed, and so made up: what a second cuInit does after one that failed (it starts
 * anew), and all of MIG, which follows NVIDIA's documentation.
 */
#define _GNU_SOURCE
#include "state.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef void *CUcontext;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    STUB_LIBRARY = 34,
    DEVICE_UNAVAILABLE = 46,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    UNKNOWN = 999,
};

/* A device of this process: a GPU, or a MIG instance of it. */
struct device {
    uint32_t gpu;
    int32_t slot;     /* -1: a whole GPU */
    uint32_t retains; /* of the primary context, the only one that a device has */
    uint64_t lock;    /* tells which of the shared processes is this one here */
};

static struct fake_state *state;
static pid_t started; /* the process that started CUDA */
static int opened = -1; /* the open file description that holds our contexts: the "device" */
static struct device devices[FAKE_GPUS];
static int device_count;

/* ---- which devices a process sees ------------------------------------------------------ */

struct named {
    int gpu; /* -1: there is none */
    int slot;
};

static const struct named nothing = {-1, -1};

/* A GPU that is named as a whole: with MIG on it stands for its first instance, if it has one. */
static struct named whole(int gpu)
{
    const struct fake_gpu *at = &state->gpus[gpu];

    if (at->mig_mode != 1)
        return (struct named){gpu, -1};
    for (uint32_t slot = 0; slot < at->mig_slots; slot++)
        if (at->mig[slot].used)
            return (struct named){gpu, (int)slot};
    return nothing;
}

/* Up to 32 hexadecimal digits, of which dashes are skipped. What follows fewer is an error. */
static int read_digits(const char *text, char digits[33])
{
    int count = 0;

    for (; *text && count < 32; text++) {
        if (isxdigit((unsigned char)*text))
            digits[count++] = (char)tolower((unsigned char)*text);
        else if (*text != '-')
            break;
    }
    digits[count] = 0;
    return count == 32 || !*text;
}

static int fits(const char *uuid, const char *digits)
{
    char all[33];

    if (!strncmp(uuid, "GPU-", 4) || !strncmp(uuid, "MIG-", 4))
        uuid += 4;
    read_digits(uuid, all);
    return !strncmp(all, digits, strlen(digits));
}

/* MIG-GPU-<uuid>/<gpu instance>/<compute instance>, from before driver R470. */
static struct named by_old_name(const char *element)
{
    char body[128], digits[33];
    unsigned int gpu_instance, compute_instance;
    struct named found = nothing;
    int matches = 0;

    if (sscanf(element, "MIG-GPU-%127[0-9a-fA-F-]/%u/%u", body, &gpu_instance,
               &compute_instance) != 3)
        return nothing;
    read_digits(body, digits);
    for (int i = 0; i < (int)state->gpu_count; i++) {
        const struct fake_gpu *gpu = &state->gpus[i];
        for (int slot = 0; slot < (int)gpu->mig_slots; slot++) {
            const struct fake_mig *mig = &gpu->mig[slot];
            if (mig->used && fits(gpu->uuid, digits) && mig->gpu_instance == gpu_instance &&
                mig->compute_instance == compute_instance) {
                found = (struct named){i, slot};
                matches++;
            }
        }
    }
    return matches == 1 ? found : nothing;
}

static struct named by_uuid(const char *element)
{
    int instances = !strncmp(element, "MIG-", 4), matches = 0;
    struct named found = nothing;
    char digits[33];

    if (!strncmp(element, "MIG-GPU-", 8))
        return by_old_name(element);
    if ((!instances && strncmp(element, "GPU-", 4)) || !element[4])
        return nothing;
    if (!read_digits(element + 4, digits))
        return nothing;
    for (int i = 0; i < (int)state->gpu_count; i++) {
        const struct fake_gpu *gpu = &state->gpus[i];
        if (gpu->denied)
            continue;
        if ((!instances || gpu->mig_mode != 1) && fits(gpu->uuid, digits)) {
            found = whole(i);
            matches++;
        }
        for (int slot = 0; instances && slot < (int)gpu->mig_slots; slot++)
            if (gpu->mig[slot].used && fits(gpu->mig[slot].uuid, digits)) {
                found = (struct named){i, slot};
                matches++;
            }
    }
    return matches == 1 ? found : nothing;
}

/* Numbers count the GPUs that the process may use, in CUDA's order. */
static struct named by_number(const char *element, const int *order, uint32_t usable)
{
    char *end;
    uint32_t number = (uint32_t)strtoul(element, &end, 10);

    if (end == element || number >= usable)
        return nothing;
    return whole(order[number]);
}

static uint32_t put_order(int *order)
{
    const char *asked = getenv("CUDA_DEVICE_ORDER");
    int fastest = state->order_differs && (!asked || strcmp(asked, "PCI_BUS_ID"));
    uint32_t usable = 0;

    for (uint32_t i = 0; i < state->gpu_count; i++) {
        int gpu = fastest ? (int)state->fastest[i] : (int)i;
        if (!state->gpus[gpu].denied)
            order[usable++] = gpu;
    }
    return usable;
}

static void show(struct named named)
{
    devices[device_count++] = (struct device){.gpu = (uint32_t)named.gpu, .slot = named.slot};
}

static CUresult show_all(const int *order, uint32_t usable)
{
    /* Beside a MIG instance nothing else is shown. */
    for (uint32_t i = 0; i < usable; i++)
        if (whole(order[i]).slot >= 0)
            return show(whole(order[i])), SUCCESS;
    for (uint32_t i = 0; i < usable; i++)
        if (whole(order[i]).gpu >= 0)
            show(whole(order[i]));
    return SUCCESS;
}

static int is_shown(struct named named)
{
    for (int i = 0; i < device_count; i++)
        if ((int)devices[i].gpu == named.gpu && devices[i].slot == named.slot)
            return 1;
    return 0;
}

/* The list ends at its first element that is no device; a device named twice is an error. */
static CUresult show_list(const char *list, const int *order, uint32_t usable)
{
    int uuids = !strncmp(list, "GPU-", 4) || !strncmp(list, "MIG-", 4), more = 1;

    for (const char *at = list; more;) {
        size_t length = strcspn(at, ",");
        char *element = strndup(at, length);
        struct named named = uuids ? by_uuid(element) : by_number(element, order, usable);

        free(element);
        more = at[length] == ',';
        at += length + 1;
        if (named.gpu < 0)
            break;
        if (is_shown(named))
            return INVALID_DEVICE;
        if (device_count && (named.slot >= 0 || devices[0].slot >= 0))
            break;
        show(named);
    }
    return SUCCESS;
}

static CUresult find_devices(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES"), *asked = getenv("CUDA_DEVICE_ORDER");
    int order[FAKE_GPUS];
    uint32_t usable = put_order(order);
    CUresult result;

    device_count = 0;
    if (!usable)
        return NO_DEVICE;
    if (asked && strcmp(asked, "PCI_BUS_ID") && strcmp(asked, "FASTEST_FIRST"))
        return INVALID_DEVICE;
    result = list ? show_list(list, order, usable) : show_all(order, usable);
    return result || device_count ? result : NO_DEVICE;
}

/* ---- start ----------------------------------------------------------------------------- */

/* Every function begins here. In a forked child all of them fail, whatever is asked. */
static CUresult enter(const char *function, CUdevice device)
{
    CUresult fault;
    int gpu = started && device >= 0 && device < device_count ? (int)devices[device].gpu : -1;

    state = fake_open();
    if (!state)
        return NO_DEVICE;
    fault = fake_fault(function, gpu);
    if (fault)
        return fault;
    return started == getpid() ? SUCCESS : NOT_INITIALIZED;
}

#define ENTER(device)                                  \
    do {                                               \
        CUresult problem = enter(__func__, (device));  \
        if (problem)                                   \
            return problem;                            \
    } while (0)

#define ENTER_AT(device)                               \
    do {                                               \
        ENTER(device);                                 \
        if ((device) < 0 || (device) >= device_count)  \
            return INVALID_DEVICE;                     \
    } while (0)

/* The descriptor keeps out of the way of job scripts, which use low numbers. */
static int open_device(void)
{
    const char *path = getenv("GPUAFF_FAKE_STATE");
    int low = open(path ? path : "", O_RDWR | O_CLOEXEC);
    int high = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, 600);

    if (high < 0)
        return low;
    close(low);
    return high;
}

CUresult cuInit(unsigned int flags)
{
    CUresult result;
    int lock;

    state = fake_open();
    if (!state)
        return NO_DEVICE;
    if (state->stub)
        return STUB_LIBRARY;
    result = fake_fault(__func__, -1);
    if (result)
        return result;
    if (flags)
        return INVALID_VALUE;
    if (started)
        return started == getpid() ? SUCCESS : NOT_INITIALIZED;
    lock = fake_lock();
    result = started ? SUCCESS : find_devices();
    if (!result && !started) {
        opened = open_device();
        started = getpid();
    }
    fake_unlock(lock);
    return result;
}

/* ---- devices --------------------------------------------------------------------------- */

CUresult cuDeviceGetCount(int *count)
{
    ENTER(-1);
    *count = device_count;
    return SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER_AT(ordinal);
    *device = ordinal;
    return SUCCESS;
}

static CUresult put_uuid(unsigned char *to, const char *uuid)
{
    char digits[33], pair[3] = "";

    memset(to, 0, 16);
    if (!strncmp(uuid, "GPU-", 4) || !strncmp(uuid, "MIG-", 4))
        uuid += 4;
    read_digits(uuid, digits);
    for (size_t i = 0; i < strlen(digits); i += 2) {
        memcpy(pair, digits + i, 2);
        to[i / 2] = (unsigned char)strtoul(pair, NULL, 16);
    }
    return SUCCESS;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, CUdevice device)
{
    ENTER_AT(device);
    const struct fake_gpu *gpu = &state->gpus[devices[device].gpu];
    int32_t slot = devices[device].slot;
    return put_uuid(uuid, slot < 0 ? gpu->uuid : gpu->mig[slot].uuid);
}

/* The older function tells the GPU's, of a MIG instance too. */
CUresult cuDeviceGetUuid(unsigned char *uuid, CUdevice device)
{
    ENTER_AT(device);
    return put_uuid(uuid, state->gpus[devices[device].gpu].uuid);
}

/* ---- contexts -------------------------------------------------------------------------- */

/* The entry of this process; NULL where a test has taken it away. Under the lock, as all here. */
static struct fake_process *entry_of(const struct device *device)
{
    for (uint32_t i = 0; device->lock && i < state->process_count; i++)
        if (state->processes[i].lock == device->lock)
            return &state->processes[i];
    return NULL;
}

static int set_lock(uint64_t number, short kind)
{
    struct flock byte = {.l_type = kind, .l_whence = SEEK_SET, .l_start = FAKE_BYTE(number),
                         .l_len = 1};

    return fcntl(opened, F_OFD_SETLK, &byte);
}

static uint32_t own_pid(void)
{
    return (uint32_t)getpid() + (fake_at_home() ? 0 : FAKE_FOREIGN);
}

static int meet(const struct device *device, const struct fake_process *other)
{
    return other->gpu == device->gpu &&
           (other->slot == device->slot || other->slot < 0 || device->slot < 0);
}

/* Whether the compute mode lets one more process in. Who lingers still counts. */
static int is_closed(const struct device *device)
{
    int mode = state->gpus[device->gpu].compute_mode;

    if (mode == 2) /* prohibited */
        return 1;
    if (mode != 1 && mode != 3) /* exclusive */
        return 0;
    for (uint32_t i = 0; i < state->process_count; i++)
        if (meet(device, &state->processes[i]) && state->processes[i].kinds & FAKE_COMPUTE)
            return 1;
    return 0;
}

/* The proof that claims are for: who is let onto a device that another live process of ours is
 * on. Those whom a test has planted claim nothing, and do not count. */
static void log_doubles(const struct device *device)
{
    for (uint32_t i = 0; i < state->process_count; i++) {
        const struct fake_process *other = &state->processes[i];
        if (!other->lock || other->noticed || !meet(device, other))
            continue;
        state->doubles[state->double_count++ % FAKE_DOUBLES] = (struct fake_double){
            .gpu = device->gpu,
            .slot = device->slot,
            .holder = other->pid,
            .newcomer = own_pid(),
            .at = fake_now(),
        };
    }
}

static uint64_t free_memory(const struct device *device)
{
    return fake_total(device->gpu, device->slot) - fake_reserved(device->gpu, device->slot) -
           fake_used(device->gpu, device->slot);
}

static uint64_t context_memory(const struct device *device)
{
    return state->context_memory[device->gpu];
}

static CUresult enter_device(struct device *device)
{
    if (is_closed(device))
        return DEVICE_UNAVAILABLE;
    if (free_memory(device) < context_memory(device))
        return OUT_OF_MEMORY;
    if (state->process_count == FAKE_PROCESSES) {
        fprintf(stderr, "fake driver: no room for another process\n");
        return UNKNOWN;
    }
    device->lock = ++state->locks;
    if (set_lock(device->lock, F_WRLCK)) {
        perror("fake driver: the lock of a context");
        return UNKNOWN;
    }
    log_doubles(device);
    state->gpus[device->gpu].contexts++;
    state->processes[state->process_count++] = (struct fake_process){
        .gpu = device->gpu,
        .slot = device->slot,
        .pid = own_pid(),
        .kinds = FAKE_COMPUTE,
        .memory = context_memory(device),
        .start = fake_at_home() ? fake_start(own_pid()) : 0,
        .lock = device->lock,
        .names = fake_namespace(),
    };
    return SUCCESS;
}

static void leave_device(struct device *device)
{
    struct fake_process *entry = entry_of(device);

    if (entry)
        fake_remove((uint32_t)(entry - state->processes));
    set_lock(device->lock, F_UNLCK);
    device->lock = 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = SUCCESS;
    int lock;

    ENTER_AT(device);
    lock = fake_lock();
    fake_sweep(lock, devices[device].gpu);
    if (!devices[device].retains)
        result = enter_device(&devices[device]);
    if (!result) {
        devices[device].retains++;
        *context = &devices[device];
    }
    fake_unlock(lock);
    return result;
}

static CUresult release(CUdevice device)
{
    CUresult result = INVALID_CONTEXT;
    int lock = fake_lock();

    if (devices[device].retains) {
        if (!--devices[device].retains)
            leave_device(&devices[device]);
        result = SUCCESS;
    }
    fake_unlock(lock);
    return result;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER_AT(device);
    return release(device);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    ENTER_AT(device);
    return release(device);
}

/* ---- errors: these work whatever else does --------------------------------------------- */

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE",
     "CUDA-capable device(s) is/are busy or unavailable"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorName(CUresult code, const char **name)
{
    *name = NULL;
    for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
        if (errors[i].code == code)
            return *name = errors[i].name, SUCCESS;
    return INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **text)
{
    *text = NULL;
    for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
        if (errors[i].code == code)
            return *text = errors[i].text, SUCCESS;
    return INVALID_VALUE;
}
