/* As much of NVIDIA's driver as infra/gpu_trial.py calls, with GPUs that are memory of the process. */

#include <signal.h>
#include <stdlib.h>
#include <string.h>

static int number(const char *name) { return getenv(name) ? atoi(getenv(name)) : 0; }

int cuInit(unsigned flags)
{
    if (number("STUB_CRASHES")) raise(SIGSEGV);
    return flags ? 1 : number("STUB_INIT");
}
int cuDeviceGetCount(int *count) { *count = number("STUB_GPUS"); return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, device < 10 ? "?" : getenv("STUB_NAME") ? getenv("STUB_NAME") : "Stub GPU", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = number("STUB_GB") * 1000000000ULL; return device < 10; }
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    *context = malloc(1);
    return device == 11 ? number("STUB_SECOND") : 0;
}
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) { *pointer = (unsigned long long)malloc(bytes); return 0; }
int cuMemsetD32_v2(unsigned long long pointer, unsigned word, size_t words)
{
    for (size_t i = 0; i < words; i++) ((unsigned *)pointer)[i] = word;
    if (number("STUB_FORGETS")) ((unsigned *)pointer)[words - 1] ^= 1;
    return 0;
}
int cuMemcpyDtoH_v2(void *host, unsigned long long pointer, size_t bytes)
{
    memcpy(host, (void *)pointer, bytes);
    return 0;
}
int cuMemFree_v2(unsigned long long pointer) { free((void *)pointer); return 0; }
int cuGetErrorString(int code, const char **text) { *text = "system not yet initialized"; return code == 802 ? 0 : 1; }
