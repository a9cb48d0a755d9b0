/* The state of the fake driver: one file, which every process that uses the driver maps.
 *
 * tests/fakedriver/state.py writes it and must have the same layout: a library refuses a file
 * of another version or size. What is new goes to the end and raises FAKE_VERSION.
 */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include <stdint.h>

#define FAKE_MAGIC 0x4b414647u /* "GFAK" */
#define FAKE_VERSION 2u

enum {
    FAKE_GPUS = 32,
    FAKE_CPU_WORDS = 128, /* 8192 CPUs */
    FAKE_NODE_WORDS = 16, /* 1024 NUMA nodes */
    FAKE_MIG_SLOTS = 16,
    FAKE_LINKS = 36,
    FAKE_FAULTS = 64,
    FAKE_PROCESSES = 256,
};

/* The codes of nvml.h that the fake driver gives of itself. */
enum {
    FAKE_OK = 0,
    FAKE_UNINITIALIZED = 1,
    FAKE_INVALID_ARGUMENT = 2,
    FAKE_NOT_SUPPORTED = 3,
    FAKE_NO_PERMISSION = 4,
    FAKE_NOT_FOUND = 6,
    FAKE_INSUFFICIENT_SIZE = 7,
    FAKE_DRIVER_NOT_LOADED = 9,
    FAKE_UNKNOWN = 999,
};

/* A slot for a MIG instance. */
struct fake_mig {
    int32_t used;
    uint32_t gpu_instance;
    uint32_t compute_instance;
    char uuid[96];
};

struct fake_link {
    int32_t active;  /* -1: Not Supported */
    int32_t kind;    /* what is at the other end, NVML_NVLINK_DEVICE_TYPE_... */
    char remote[32]; /* the PCI address of the other end */
};

struct fake_gpu {
    char uuid[96];
    char name[96];
    char bus_id[32];     /* as NVML spells it, 00000000:07:00.0 */
    int32_t node_code;   /* what the CPU affinity by node returns: 0, or an error */
    int32_t socket_code; /* likewise by socket */
    int32_t memory_code; /* likewise the memory affinity */
    int32_t memory_node; /* the NUMA node that is its memory; -1: Not Supported */
    int32_t mig_mode;    /* -1: Not Supported, 0: off, 1: on */
    uint32_t mig_slots;
    uint32_t links;            /* above these, a link's number is an Invalid Argument */
    int32_t path[FAKE_GPUS];   /* nvmlGpuTopologyLevel_t to each GPU; -1: Not Supported */
    uint64_t node_cpus[FAKE_CPU_WORDS];
    uint64_t socket_cpus[FAKE_CPU_WORDS];
    uint64_t memory_nodes[FAKE_NODE_WORDS];
    struct fake_mig mig[FAKE_MIG_SLOTS];
    struct fake_link link[FAKE_LINKS];
};

/* A function that is to fail, or (code 0) whose calls are only counted. */
struct fake_fault {
    char function[64]; /* "*": every function but the starts and the shutdown */
    int32_t gpu;       /* -1: whichever GPU is asked */
    int32_t code;      /* what it returns */
    uint32_t after;    /* so many calls are served before */
    uint32_t calls;    /* the calls so far, of all processes */
};

/* A process with a CUDA context. */
struct fake_process {
    uint32_t gpu;
    int32_t slot; /* the MIG slot that it is on; -1: the whole GPU */
    uint32_t pid;
    uint64_t memory; /* in bytes */
};

struct fake_state {
    uint32_t magic;
    uint32_t version;
    uint64_t size;
    uint32_t inits;     /* the starts of NVML that succeeded, of all processes */
    uint32_t shutdowns; /* the shutdowns that succeeded */
    uint32_t stub;      /* 1: behave as the library that is only for linking */
    uint32_t fault_count;
    uint32_t gpu_count;
    uint32_t strict_masks; /* 1: a mask with too little room is an Insufficient Size */
    char driver_version[80];
    struct fake_fault faults[FAKE_FAULTS];
    struct fake_gpu gpus[FAKE_GPUS];
    uint32_t unprivileged; /* 1: a GPU with MIG tells its processes by instance only */
    uint32_t process_count;
    struct fake_process processes[FAKE_PROCESSES];
};

/* Map the file that GPUAFF_FAKE_STATE names. NULL, said on stderr, when it cannot be used. */
struct fake_state *fake_open(void);

/* Keep other processes and threads from the state; fake_unlock takes what fake_lock gave. */
int fake_lock(void);
void fake_unlock(int lock);

/* Count this call, and tell what it is to return: 0, or the code of a fault. */
int fake_fault(const char *function, int gpu);

#endif
