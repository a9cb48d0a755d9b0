/* The state of the fake driver: one file, which every process that uses the driver maps.
 * tests/fakedriver/state.py reads the layout from here: one member to a line.
 */
#ifndef FAKE_STATE_H
#define FAKE_STATE_H

#include <stdint.h>
#include <sys/types.h>

enum {
    FAKE_GPUS = 32,
    FAKE_CPU_WORDS = 128, /* 8192 CPUs */
    FAKE_NODE_WORDS = 16, /* 1024 NUMA nodes */
    FAKE_MIG_SLOTS = 16,
    FAKE_LINKS = 36,
    FAKE_FAULTS = 64,
    FAKE_PROCESSES = 256,
    FAKE_DOUBLES = 64,
    FAKE_FOREIGN = 1 << 22, /* the most that Linux lets a pid be, and above all that are */
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
    FAKE_VERSION_MISMATCH = 25,
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
    int32_t compute_mode;   /* nvmlComputeMode_t */
    int32_t display_active; /* -1: Not Supported; the next three likewise */
    int32_t display_mode;
    int32_t utilization; /* in percent */
    int32_t denied;      /* 1: a device cgroup keeps it from CUDA */
    uint32_t contexts;   /* how many contexts were made on it, each process counted once */
    uint64_t memory;     /* in bytes, as are the next three */
    uint64_t reserved;   /* what the driver keeps for itself */
    uint64_t idle;       /* what is in use where nobody uses it */
    uint64_t unexplained;               /* what is in use by none of the processes */
    uint64_t slots_used[FAKE_MIG_SLOTS]; /* likewise on each MIG instance */
};

/* What comes of a call that a fault is set for. */
enum { FAKE_RETURN, FAKE_HANG, FAKE_KILL, FAKE_STOP };

/* A function that is to fail, or (it returns code 0) whose calls are only counted. */
struct fake_fault {
    char function[64]; /* "*": every function of NVML but the starts and the shutdown;
                          with * at the end: every function that begins so */
    int32_t gpu;       /* -1: whichever GPU is asked */
    int32_t code;      /* what it returns; 0: it does its work */
    uint32_t after;    /* so many calls are served before */
    uint32_t calls;    /* the calls so far, of all processes */
    uint32_t action;   /* before it returns: FAKE_HANG, FAKE_KILL or FAKE_STOP the caller */
    uint32_t ms;       /* FAKE_HANG: for so long; 0: for ever */
    uint32_t times;    /* only so many calls; 0: all */
    uint32_t pid;      /* only the calls of this process; 0: of all */
};

enum { FAKE_COMPUTE = 1, FAKE_GRAPHICS = 2 };

/* A process with a context: planted by a test, or made by our libcuda.
 *
 * As with the real driver it is the open device that holds a context, and not the process: so
 * it stays with a forked child of a holder that was killed, and goes at exec. Our libcuda plays
 * this with an open file description of the state file, which has an OFD lock on a byte that
 * the context has for itself, far behind the end.
 */
struct fake_process {
    uint32_t gpu;
    int32_t slot; /* the MIG slot that it is on; -1: the whole GPU */
    uint32_t pid;
    uint32_t kinds;    /* FAKE_COMPUTE, FAKE_GRAPHICS or both */
    uint64_t memory;   /* in bytes */
    uint64_t start;    /* when pid started, field 22 of its stat; 0: it is not of this PID
                          namespace, and so never found dead */
    uint64_t lock;     /* the number of its byte; 0: planted by a test */
    uint64_t noticed;  /* when it was found dead, monotonic, in ns; 0: it lives */
    uint32_t unlisted; /* 1: it is dead, and a child keeps its memory */
    uint64_t names;    /* the inode of its PID namespace; 0: planted by a test */
};

/* Two processes that our libcuda let onto one device. */
struct fake_double {
    uint32_t gpu;
    int32_t slot;
    uint32_t holder;
    uint32_t newcomer;
    uint64_t at; /* monotonic, in ns */
};

struct fake_state {
    uint32_t inits;     /* the starts of NVML that succeeded, of all processes */
    uint32_t shutdowns; /* the shutdowns that succeeded */
    uint32_t stub;      /* 1: behave as the library that is only for linking */
    uint32_t fault_count;
    uint32_t gpu_count;
    char driver_version[80];
    struct fake_fault faults[FAKE_FAULTS];
    struct fake_gpu gpus[FAKE_GPUS];
    uint32_t unprivileged; /* 1: a GPU with MIG tells its processes by instance only */
    uint32_t process_count;
    struct fake_process processes[FAKE_PROCESSES];
    uint32_t hidden;         /* 1: no list tells of a process, as in some containers */
    uint32_t untold_memory;  /* 1: how much memory each process has is not available */
    uint32_t linger_ms;      /* the dead stay for so long after somebody has found them dead */
    int32_t order_differs;   /* 1: CUDA's own order is fastest, else NVML's */
    uint32_t fastest[FAKE_GPUS];
    uint64_t locks;        /* the numbers of contexts' bytes that were given out */
    uint64_t double_count; /* all that there were: the log keeps the last */
    struct fake_double doubles[FAKE_DOUBLES];
    uint64_t pid_namespace; /* the inode of the one that all pids here are of */
    uint64_t context_memory[FAKE_GPUS]; /* what a context takes, in bytes */
    uint32_t apart; /* 1: outside of pid_namespace a process is told of its own namespace's alone */
};

/* Map the file that GPUAFF_FAKE_STATE names. NULL, said on stderr, when it cannot be used. */
struct fake_state *fake_open(void);

/* Keep other processes and threads from the state; fake_unlock takes what fake_lock gave. */
int fake_lock(void);
void fake_unlock(int lock);

/* The byte whose lock tells that a context's device is still open. */
#define FAKE_BYTE(number) ((off_t)(((uint64_t)1 << 40) + (number)))

/* The byte whose lock tells that a thread of this process is at work on the state, or stops it. */
#define FAKE_PROCESS_BYTE(space, pid) \
    ((off_t)(((uint64_t)1 << 62) + (((space) & 0xffffffff) << 24) + (uint64_t)(pid)))

/* Count this call, let come of it what is set (not under the lock), and tell what it is to
 * return: 0, or the code of a fault. */
int fake_fault(const char *function, int gpu);

/* The next are called under the lock. */

/* Find out who of a GPU's processes is dead; the dead who have lingered are removed. */
void fake_sweep(int lock, uint32_t gpu);

/* What of a GPU (slot -1) or a MIG slot is in use, beside what is reserved. */
uint64_t fake_used(uint32_t gpu, int32_t slot);

/* How much a GPU or a MIG slot has, and how much of it is reserved. */
uint64_t fake_total(uint32_t gpu, int32_t slot);
uint64_t fake_reserved(uint32_t gpu, int32_t slot);

void fake_remove(uint32_t place);

uint64_t fake_now(void);

/* Whether this process is in the PID namespace of the state. Who is not cannot look for the
 * others, and is listed as FAKE_FOREIGN and its own pid: as in a container, where the driver's
 * pids mean nothing. */
int fake_at_home(void);
uint64_t fake_namespace(void);

/* Field 22 of a process's stat; 0 where there is none or it is a zombie. */
uint64_t fake_start(uint32_t pid);

#endif
