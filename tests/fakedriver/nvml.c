/* A fake libnvidia-ml.so.1: NVML's symbols over a machine that state.h describes.
 *
 * It has what gpuaff and its tests call through nvidia-ml-py. The names, the order and types of
 * the arguments and the struct are NVML's. A handle points at the GPU or the MIG slot in the
 * mapped state, as NVML's handles point into NVML.
 */
#define _GNU_SOURCE
#include "state.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device;
    unsigned int pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

static struct fake_state *state;
static int started; /* the starts of this process that were not shut down */

/* ---- handles --------------------------------------------------------------------------- */

static int index_of(nvmlDevice_t handle)
{
    char *first = (char *)state->gpus, *asked = handle;
    char *end = first + state->gpu_count * sizeof(struct fake_gpu);

    return asked >= first && asked < end ? (int)((asked - first) / sizeof(struct fake_gpu)) : -1;
}

static struct fake_gpu *gpu_of(nvmlDevice_t handle)
{
    int index = index_of(handle);
    return index >= 0 && handle == &state->gpus[index] ? handle : NULL;
}

static struct fake_mig *mig_of(nvmlDevice_t handle)
{
    int index = index_of(handle);
    return index >= 0 && handle != &state->gpus[index] ? handle : NULL;
}

/* Every function begins here: NVML must be started, and no fault set for this call. */
static nvmlReturn_t enter(const char *function, int gpu)
{
    return started > 0 ? fake_fault(function, gpu) : FAKE_UNINITIALIZED;
}

#define ENTER(gpu)                                   \
    do {                                             \
        nvmlReturn_t fault = enter(__func__, (gpu)); \
        if (fault)                                   \
            return fault;                            \
    } while (0)

/* As ENTER, for a function that is asked of a handle. */
#define ENTER_AT(handle)                              \
    do {                                              \
        if (started > 0 && index_of(handle) < 0)      \
            return FAKE_INVALID_ARGUMENT;             \
        ENTER(started > 0 ? index_of(handle) : -1);   \
    } while (0)

/* As ENTER_AT, for a function that only a whole GPU answers. */
#define ENTER_GPU(handle)                  \
    do {                                   \
        ENTER_AT(handle);                  \
        if (!gpu_of(handle))               \
            return FAKE_INVALID_ARGUMENT;  \
    } while (0)

static nvmlReturn_t put(char *to, unsigned int room, const char *text)
{
    if (strlen(text) + 1 > room)
        return FAKE_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return FAKE_OK;
}

/* ---- start and shutdown ---------------------------------------------------------------- */

static const char *const stub_warning =
    "\n!!!!!!!!!!!!!!!!!!!!\nWARNING:\n\nThis libnvidia-ml.so is a stub library: link with it, but\n"
    "run with the one that came with the display driver.\n!!!!!!!!!!!!!!!!!!!!\n";

static void count(uint32_t *counter, int step)
{
    int lock = fake_lock();

    started += step;
    ++*counter;
    fake_unlock(lock);
}

static nvmlReturn_t start(const char *function)
{
    nvmlReturn_t fault;

    state = fake_open();
    if (!state)
        return FAKE_DRIVER_NOT_LOADED;
    if (state->stub) { /* the real stub speaks on stdout, too */
        fputs(stub_warning, stdout);
        return FAKE_DRIVER_NOT_LOADED;
    }
    fault = fake_fault(function, -1);
    if (!fault)
        count(&state->inits, 1);
    return fault;
}

nvmlReturn_t nvmlInit_v2(void) { return start(__func__); }

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return start(__func__);
}

nvmlReturn_t nvmlShutdown(void)
{
    ENTER(-1);
    count(&state->shutdowns, -1);
    return FAKE_OK;
}

const char *nvmlErrorString(nvmlReturn_t code)
{
    if (state && state->stub)
        return stub_warning;
    return code == FAKE_OK ? "Success" : "an error of\nthe fake driver";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER(-1);
    return put(version, length, state->driver_version);
}

/* ---- from a number, a name or an address to a handle ----------------------------------- */

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *gpus)
{
    ENTER(-1);
    *gpus = state->gpu_count;
    return FAKE_OK;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    ENTER((int)index);
    if (index >= state->gpu_count)
        return FAKE_INVALID_ARGUMENT;
    if (state->gpus[index].denied)
        return FAKE_NO_PERMISSION;
    *device = &state->gpus[index];
    return FAKE_OK;
}

/* ---- who a device is ------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    ENTER_AT(device);
    return put(name, length, state->gpus[index_of(device)].name);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    ENTER_AT(device);
    return put(uuid, length, gpu_of(device) ? gpu_of(device)->uuid : mig_of(device)->uuid);
}

static nvmlReturn_t put_address(nvmlPciInfo_t *pci, const char *bus_id)
{
    memset(pci, 0, sizeof(*pci));
    strcpy(pci->busId, bus_id);
    if (sscanf(bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) == 3)
        snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0",
                 pci->domain & 0xffff, pci->bus & 0xff, pci->device & 0xff);
    return FAKE_OK;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER_AT(device);
    return put_address(pci, state->gpus[index_of(device)].bus_id);
}

/* ---- who uses it ----------------------------------------------------------------------- */

typedef struct {
    unsigned int pid;
    unsigned long long memory;
    unsigned int gpu_instance, compute_instance; /* all bits are set where there is none */
} nvmlProcessInfo_t;

static int is_on(const struct fake_process *process, nvmlDevice_t device)
{
    int index = index_of(device);

    if (process->gpu != (uint32_t)index)
        return 0;
    return gpu_of(device) ||
           (process->slot >= 0 && device == &state->gpus[index].mig[process->slot]);
}

static void put_process(nvmlProcessInfo_t *to, const struct fake_process *process)
{
    const struct fake_mig *mig = state->gpus[process->gpu].mig;

    to->pid = process->pid - (state->apart && !fake_at_home() ? FAKE_FOREIGN : 0);
    to->memory = state->untold_memory ? ~0ull : process->memory;
    to->gpu_instance = process->slot < 0 ? ~0u : mig[process->slot].gpu_instance;
    to->compute_instance = process->slot < 0 ? ~0u : mig[process->slot].compute_instance;
}

/* Whether this process is told of another one. */
static int is_told(const struct fake_process *process)
{
    if (state->hidden)
        return 0;
    return !state->apart || fake_at_home() || process->names == fake_namespace();
}

/* As NVML: with too little room the answer is how much is needed. */
static nvmlReturn_t put_processes(nvmlDevice_t device, uint32_t kind, unsigned int *room,
                                  nvmlProcessInfo_t *to)
{
    unsigned int found = 0, held = to ? *room : 0;
    int lock;

    if (state->unprivileged && gpu_of(device) && gpu_of(device)->mig_mode == 1)
        return FAKE_NO_PERMISSION;
    lock = fake_lock();
    fake_sweep(lock, (uint32_t)index_of(device));
    for (uint32_t i = 0; i < state->process_count; i++) {
        const struct fake_process *process = &state->processes[i];
        if (!is_told(process) || !is_on(process, device) || !(process->kinds & kind) || process->unlisted)
            continue;
        if (found < held)
            put_process(&to[found], process);
        found++;
    }
    fake_unlock(lock);
    *room = found;
    return found > held ? FAKE_INSUFFICIENT_SIZE : FAKE_OK;
}

#define PROCESSES(name, kind)                                                                  \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *to)          \
    {                                                                                          \
        ENTER_AT(device);                                                                      \
        return put_processes(device, kind, room, to);                                          \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, FAKE_COMPUTE)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, FAKE_COMPUTE)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, FAKE_GRAPHICS)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, FAKE_GRAPHICS)

/* ---- how it is used -------------------------------------------------------------------- */

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

#define MEMORY_V2 ((unsigned int)sizeof(nvmlMemory_v2_t) | 2u << 24)

static nvmlMemory_v2_t memory_of(nvmlDevice_t device)
{
    uint32_t gpu = (uint32_t)index_of(device);
    int32_t slot = gpu_of(device) ? -1 : (int32_t)(mig_of(device) - state->gpus[gpu].mig);
    nvmlMemory_v2_t memory = {.version = MEMORY_V2};
    int lock = fake_lock();

    fake_sweep(lock, gpu);
    memory.total = fake_total(gpu, slot);
    memory.reserved = fake_reserved(gpu, slot);
    memory.used = fake_used(gpu, slot);
    memory.free = memory.total - memory.reserved - memory.used;
    fake_unlock(lock);
    return memory;
}

/* The old function counts as used what the driver keeps for itself. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *to)
{
    ENTER_AT(device);
    nvmlMemory_v2_t memory = memory_of(device);
    to->total = memory.total;
    to->free = memory.free;
    to->used = memory.used + memory.reserved;
    return FAKE_OK;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *to)
{
    ENTER_AT(device);
    if (to->version != MEMORY_V2)
        return FAKE_VERSION_MISMATCH;
    *to = memory_of(device);
    return FAKE_OK;
}

/* NVML's manual: not supported where MIG is on. */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, unsigned int rates[2])
{
    ENTER_AT(device);
    if (!gpu_of(device) || gpu_of(device)->mig_mode == 1 || gpu_of(device)->utilization < 0)
        return FAKE_NOT_SUPPORTED;
    rates[0] = (unsigned int)gpu_of(device)->utilization;
    rates[1] = 0; /* of the memory's bandwidth */
    return FAKE_OK;
}

static nvmlReturn_t put_number(int *to, int32_t number)
{
    if (number < 0)
        return FAKE_NOT_SUPPORTED;
    *to = number;
    return FAKE_OK;
}

/* A number of a whole GPU, which is negative where it is not supported. */
#define NUMBER(name, member)                               \
    nvmlReturn_t name(nvmlDevice_t device, int *to)        \
    {                                                      \
        ENTER_GPU(device);                                 \
        return put_number(to, gpu_of(device)->member);     \
    }

NUMBER(nvmlDeviceGetComputeMode, compute_mode)
NUMBER(nvmlDeviceGetDisplayActive, display_active)
NUMBER(nvmlDeviceGetDisplayMode, display_mode)
NUMBER(nvmlDeviceGetNumaNodeId, memory_node)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, mig_slots)

/* ---- what is near it ------------------------------------------------------------------- */

/* Hand out a mask, or what of it finds room. */
static nvmlReturn_t put_mask(unsigned long *to, unsigned int room, const uint64_t *mask,
                             unsigned int words, int code)
{
    if (code)
        return code;
    if (!to || !room)
        return FAKE_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < room; i++)
        to[i] = i < words ? mask[i] : 0;
    return FAKE_OK;
}

nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned int words,
                                                 unsigned long *cpus, unsigned int scope)
{
    ENTER_GPU(device);
    struct fake_gpu *gpu = device;
    if (scope > 1)
        return FAKE_INVALID_ARGUMENT;
    return put_mask(cpus, words, scope ? gpu->socket_cpus : gpu->node_cpus, FAKE_CPU_WORDS,
                    scope ? gpu->socket_code : gpu->node_code);
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *cpus)
{
    ENTER_GPU(device);
    struct fake_gpu *gpu = device;
    return put_mask(cpus, words, gpu->node_cpus, FAKE_CPU_WORDS, gpu->node_code);
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int words,
                                         unsigned long *nodes, unsigned int scope)
{
    ENTER_GPU(device);
    struct fake_gpu *gpu = device;
    (void)scope; /* no machine of ours tells the two apart */
    return put_mask(nodes, words, gpu->memory_nodes, FAKE_NODE_WORDS, gpu->memory_code);
}

/* ---- MIG ------------------------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *now, unsigned int *pending)
{
    ENTER_GPU(device);
    struct fake_gpu *gpu = device;
    *now = *pending = gpu->mig_mode;
    return gpu->mig_mode < 0 ? FAKE_NOT_SUPPORTED : FAKE_OK;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int slot,
                                                 nvmlDevice_t *instance)
{
    ENTER_GPU(device);
    struct fake_gpu *gpu = device;
    if (slot >= gpu->mig_slots)
        return FAKE_INVALID_ARGUMENT;
    *instance = &gpu->mig[slot];
    return gpu->mig[slot].used ? FAKE_OK : FAKE_NOT_FOUND;
}

#define INSTANCE_ID(name, member)                            \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int *id) \
    {                                                        \
        ENTER_AT(device);                                    \
        if (!mig_of(device))                                 \
            return FAKE_NOT_SUPPORTED;                       \
        *id = mig_of(device)->member;                        \
        return FAKE_OK;                                      \
    }

INSTANCE_ID(nvmlDeviceGetGpuInstanceId, gpu_instance)
INSTANCE_ID(nvmlDeviceGetComputeInstanceId, compute_instance)

/* ---- how it is connected --------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t device, nvmlDevice_t other, int *level)
{
    ENTER_GPU(device);
    if (!gpu_of(other))
        return FAKE_INVALID_ARGUMENT;
    *level = gpu_of(device)->path[index_of(other)];
    return *level < 0 ? FAKE_NOT_SUPPORTED : FAKE_OK;
}

static nvmlReturn_t find_link(nvmlDevice_t device, unsigned int number, struct fake_link **link)
{
    struct fake_gpu *gpu = device;
    if (number >= gpu->links || number >= FAKE_LINKS)
        return FAKE_INVALID_ARGUMENT;
    *link = &gpu->link[number];
    return (*link)->active < 0 ? FAKE_NOT_SUPPORTED : FAKE_OK;
}

#define LINK_NUMBER(name, member)                                              \
    nvmlReturn_t name(nvmlDevice_t device, unsigned int number, int *to)       \
    {                                                                          \
        struct fake_link *link;                                                \
        ENTER_GPU(device);                                                     \
        nvmlReturn_t code = find_link(device, number, &link);                  \
        if (!code)                                                             \
            *to = link->member;                                                \
        return code;                                                           \
    }

LINK_NUMBER(nvmlDeviceGetNvLinkState, active)
LINK_NUMBER(nvmlDeviceGetNvLinkRemoteDeviceType, kind)

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int number,
                                                 nvmlPciInfo_t *pci)
{
    struct fake_link *link;
    ENTER_GPU(device);
    nvmlReturn_t code = find_link(device, number, &link);
    return code ? code : put_address(pci, link->remote);
}
