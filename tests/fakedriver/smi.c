/* A fake nvidia-smi: as much of it as safe-gpu 2.0.0 calls, over the fake NVML. */
#include "state.h"

#include <stdio.h>
#include <string.h>

typedef void *nvmlDevice_t;

typedef struct {
    char busIdLegacy[16];
    unsigned int numbers[5];
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned int pid;
    unsigned long long memory;
    unsigned int gpu_instance, compute_instance;
} nvmlProcessInfo_t;

int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlSystemGetDriverVersion(char *, unsigned int);
int nvmlDeviceGetCount_v2(unsigned int *);
int nvmlDeviceGetHandleByIndex_v2(unsigned int, nvmlDevice_t *);
int nvmlDeviceGetName(nvmlDevice_t, char *, unsigned int);
int nvmlDeviceGetUUID(nvmlDevice_t, char *, unsigned int);
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t, nvmlPciInfo_t *);
int nvmlDeviceGetDisplayMode(nvmlDevice_t, int *);
int nvmlDeviceGetDisplayActive(nvmlDevice_t, int *);
int nvmlDeviceGetComputeMode(nvmlDevice_t, int *);
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *);

static int fail(int code)
{
    printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make "
           "sure that the latest NVIDIA driver is installed and running.\n\n");
    return code == FAKE_DRIVER_NOT_LOADED ? 9 : 255;
}

static int query_gpu(unsigned int index, nvmlDevice_t gpu)
{
    nvmlPciInfo_t pci;
    int code = nvmlDeviceGetPciInfo_v3(gpu, &pci);

    if (!code)
        printf("%u, %s\n", index, pci.busId);
    return code;
}

static int query_processes(unsigned int index, nvmlDevice_t gpu)
{
    static nvmlProcessInfo_t found[FAKE_PROCESSES];
    unsigned int count = FAKE_PROCESSES;
    nvmlPciInfo_t pci;
    int code = nvmlDeviceGetPciInfo_v3(gpu, &pci);

    (void)index;
    if (!code)
        code = nvmlDeviceGetComputeRunningProcesses_v3(gpu, &count, found);
    for (unsigned int i = 0; !code && i < count; i++)
        printf("%u, %s\n", found[i].pid, pci.busId);
    return code;
}

static const char *switched(int code, int on)
{
    return code ? "N/A" : on ? "Enabled" : "Disabled";
}

static int describe(unsigned int index, nvmlDevice_t gpu)
{
    static const char *const modes[] = {"Default", "Exclusive_Thread", "Prohibited",
                                        "Exclusive_Process"};
    char name[96] = "", uuid[96] = "";
    int on = 0, mode = 0, code;
    nvmlPciInfo_t pci;

    (void)index;
    code = nvmlDeviceGetPciInfo_v3(gpu, &pci);
    if (code)
        return code;
    nvmlDeviceGetName(gpu, name, sizeof(name));
    nvmlDeviceGetUUID(gpu, uuid, sizeof(uuid));
    printf("GPU %s\n    Product Name                          : %s\n", pci.busId, name);
    code = nvmlDeviceGetDisplayMode(gpu, &on);
    printf("    Display Mode                          : %s\n", switched(code, on));
    code = nvmlDeviceGetDisplayActive(gpu, &on);
    printf("    Display Active                        : %s\n", switched(code, on));
    printf("    GPU UUID                              : %s\n", uuid);
    code = nvmlDeviceGetComputeMode(gpu, &mode);
    printf("    Compute Mode                          : %s\n\n", code ? "N/A" : modes[mode & 3]);
    return 0;
}

static int each(unsigned int count, int (*tell)(unsigned int, nvmlDevice_t))
{
    for (unsigned int i = 0; i < count; i++) {
        nvmlDevice_t gpu;
        int code = nvmlDeviceGetHandleByIndex_v2(i, &gpu);
        if (!code)
            code = tell(i, gpu);
        if (code)
            return fail(code);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *question = argc > 1 ? argv[argc - 1] : "";
    int csv = argc == 3 && !strcmp(argv[1], "--format=csv,noheader");
    char driver[96] = "";
    unsigned int count = 0;
    int code = nvmlInit_v2();

    if (!code)
        code = nvmlDeviceGetCount_v2(&count);
    if (code)
        return fail(code);
    if (csv && !strcmp(question, "--query-gpu=index,gpu_bus_id")) {
        code = each(count, query_gpu);
    } else if (csv && !strcmp(question, "--query-compute-apps=pid,gpu_bus_id")) {
        code = each(count, query_processes);
    } else if (argc == 2 && !strcmp(question, "-q")) {
        nvmlSystemGetDriverVersion(driver, sizeof(driver));
        printf("\n==============NVSMI LOG==============\n\n");
        printf("Driver Version                            : %s\n", driver);
        printf("Attached GPUs                             : %u\n", count);
        code = each(count, describe);
    } else {
        fprintf(stderr, "fake nvidia-smi: it does not know this question\n");
        code = 2;
    }
    nvmlShutdown();
    return code;
}
