/* A stand-in for libcuda.so.1: each function writes down what it was called with, and gives
 * numbers that no shorter type could carry. It drives nothing. Prototypes: CUDA driver API
 * reference, https://docs.nvidia.com/cuda/cuda-driver-api/. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct { unsigned char reserved[64]; } MemHandle;
typedef struct { unsigned char bytes[16]; } Uuid;

static char last[512];
static int result;

const char *stand_in_last(void) { return last; }
void stand_in_result(int value) { result = value; }

#define SAY(...) (snprintf(last, sizeof last, __VA_ARGS__), result)
#define BIG 0x1122334455667788ull

int cuInit(unsigned flags) { return SAY("cuInit %u", flags); }
int cuDriverGetVersion(int *version) { *version = 13000; return SAY("cuDriverGetVersion"); }
int cuGetErrorName(int error, const char **name) {
    *name = error == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : NULL;
    return error == 201 ? 0 : 1;
}
int cuGetErrorString(int error, const char **words) {
    *words = error == 201 ? "invalid device context" : NULL;
    return error == 201 ? 0 : 1;
}
int cuDeviceGetCount(int *count) { *count = 2; return SAY("cuDeviceGetCount"); }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal + 7;
    return SAY("cuDeviceGet %d", ordinal);
}
int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, device == 8 ? "NVIDIA X MIG 1g.10gb" : "NVIDIA X");
    return SAY("cuDeviceGetName %d %d", length, device);
}
int cuDeviceGetUuid(Uuid *uuid, int device) {
    memset(uuid, 0xEE, sizeof *uuid); /* the whole device's, also of a part: not what we ask */
    return SAY("cuDeviceGetUuid %d", device);
}
int cuDeviceGetUuid_v2(Uuid *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid->bytes[i] = (unsigned char)(device * 16 + i);
    return SAY("cuDeviceGetUuid_v2 %d", device);
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 113;
    return SAY("cuDeviceGetAttribute %d %d", attribute, device);
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)BIG;
    return SAY("cuDevicePrimaryCtxRetain %d", device);
}
int cuCtxPushCurrent_v2(void *context) { return SAY("cuCtxPushCurrent_v2 %p", context); }
int cuCtxPopCurrent_v2(void **context) {
    *context = (void *)BIG;
    return SAY("cuCtxPopCurrent_v2");
}
int cuCtxSynchronize(void) { return SAY("cuCtxSynchronize"); }
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    *address = BIG;
    return SAY("cuMemAlloc_v2 %zx", size);
}
int cuMemFree_v2(uint64_t address) { return SAY("cuMemFree_v2 %lx", address); }
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    *base = BIG;
    *size = BIG + 1;
    return SAY("cuMemGetAddressRange_v2 %lx", address);
}
int cuPointerGetAttributes(unsigned count, unsigned *attributes, void **data, uint64_t address) {
    int at = snprintf(last, sizeof last, "cuPointerGetAttributes %u %lx", count, address);
    for (unsigned i = 0; i < count; i++) {
        at += snprintf(last + at, sizeof last - at, " %u", attributes[i]);
        switch (attributes[i]) { /* each value has its own size */
        case 2: *(unsigned *)data[i] = address ? 2 : 0; break; /* 0: memory of nobody's */
        case 8: *(unsigned char *)data[i] = 0; break;
        case 9: *(int *)data[i] = 1; break;
        case 10: *(unsigned char *)data[i] = 1; break;
        case 11: *(uint64_t *)data[i] = BIG; break;
        case 12: *(size_t *)data[i] = BIG + 1; break;
        case 17: *(void **)data[i] = NULL; break;
        }
    }
    return result;
}
int cuIpcGetMemHandle(MemHandle *handle, uint64_t address) {
    for (int i = 0; i < 64; i++) handle->reserved[i] = (unsigned char)i;
    return SAY("cuIpcGetMemHandle %lx", address);
}
int cuIpcOpenMemHandle_v2(uint64_t *address, MemHandle handle, unsigned flags) {
    *address = BIG;
    return SAY("cuIpcOpenMemHandle_v2 %u %u..%u", flags, handle.reserved[0], handle.reserved[63]);
}
int cuIpcCloseMemHandle(uint64_t address) { return SAY("cuIpcCloseMemHandle %lx", address); }
int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
    memset(target, 0x5A, size);
    return SAY("cuMemcpyDtoH_v2 %lx %zx", source, size);
}
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
    return SAY("cuMemcpyHtoD_v2 %lx %x %zx", target, *(const unsigned char *)source, size);
}
int cuStreamSynchronize(void *stream) { return SAY("cuStreamSynchronize %p", stream); }
int cuEventCreate(void **event, unsigned flags) {
    *event = (void *)BIG;
    return SAY("cuEventCreate %u", flags);
}
int cuEventRecord(void *event, void *stream) { return SAY("cuEventRecord %p %p", event, stream); }
int cuEventQuery(void *event) { return SAY("cuEventQuery %p", event); }
int cuEventSynchronize(void *event) { return SAY("cuEventSynchronize %p", event); }
int cuEventDestroy_v2(void *event) { return SAY("cuEventDestroy_v2 %p", event); }
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    return SAY("cuMemHostRegister_v2 %p %zx %u", address, size, flags);
}
int cuMemHostUnregister(void *address) { return SAY("cuMemHostUnregister %p", address); }

/* cuda.bindings looks every function up through this one, and means the newest of each name. */
int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                        int *status) {
    char newest[128];
    Dl_info self;
    dladdr((void *)cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    snprintf(newest, sizeof newest, "%s_v2", symbol);
    *function = dlsym(library, newest);
    if (!*function) *function = dlsym(library, symbol);
    if (status) *status = *function ? 0 : 1;
    (void)version;
    (void)flags;
    return *function ? 0 : 500;
}
