// What tests put in the place of NVIDIA's libnvidia-ml.so.1: GPUs as the environment says, all alike.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

typedef struct { unsigned long long total, free, used; } Memory;

int nvmlInitWithFlags(unsigned flags) {
    if (number("FAKE_CRASH", 0)) abort();
    return (int)number("FAKE_INIT", 0);
}
const char *nvmlErrorString(int status) { return status == 9 ? "Driver Not Loaded" : "Unknown"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.1"); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = (int)number("FAKE_CUDA", 13000); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("FAKE_COUNT", 1); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { snprintf(text, size, "GPU-%zu", (size_t)handle); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { snprintf(text, size, "Fake H1"); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    memory->total = (unsigned long long)number("FAKE_MIB", 24576) << 20;
    memory->free = (unsigned long long)number("FAKE_FREE_MIB", number("FAKE_MIB", 24576)) << 20;
    memory->used = memory->total - memory->free;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    *major = (int)number("FAKE_MAJOR", 9);
    *minor = 0;
    return 0;
}
int nvmlDeviceGetP2PStatus(void *one, void *other, int how, int *status) {
    if (how == 2 && getenv("FAKE_OLD")) return 3;  // not supported
    *status = (int)number(how == 0 ? "FAKE_PEERS" : "FAKE_NVLINK", 0);
    return 0;
}
