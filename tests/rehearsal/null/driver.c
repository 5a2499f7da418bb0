// libcuda.so.1 without a GPU: what Triton's launcher and torch's compiler ask of the driver. Modules load, nothing runs.
#include <stdlib.h>

#include "cards.h"

typedef int result;
static __thread int current;

result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
result cuDeviceGetCount(int *n) { *n = only() < 0 ? CARDS : 1; return 0; }
result cuDeviceGet(int *device, int number) { *device = number; return 0; }
result cuDeviceGetAttribute(int *value, int what, int device) {  // numbers of CUdevice_attribute
  const struct card *card = card_of(device);
  switch (what) {
    case 1: *value = 1024; break;                     // threads of a block
    case 8: *value = 49152; break;                    // shared memory of a block
    case 10: *value = 32; break;                      // warp
    case 12: case 82: *value = 65536; break;          // registers of a block, of a processor
    case 16: *value = card->processors; break;
    case 39: *value = card->threads; break;           // of a processor
    case 75: *value = card->capability / 10; break;
    case 76: *value = card->capability % 10; break;
    case 81: *value = card->shared_of_processor; break;
    case 97: *value = card->shared_of_block; break;
    default: *value = 0;
  }
  return 0;
}
result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
result cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)(device + 1); return 0; }
result cuCtxGetCurrent(void **context) { *context = (void *)(long)(current + 1); return 0; }
result cuCtxSetCurrent(void *context) { current = context ? (long)context - 1 : 0; return 0; }
result cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
result cuGetErrorString(int error, const char **text) { *text = "an error of the null driver"; return 0; }

result cuModuleLoadData(void **module, const void *image) { *module = malloc(8); return 0; }
result cuModuleLoad(void **module, const char *path) { *module = malloc(8); return 0; }
result cuModuleUnload(void *module) { free(module); return 0; }
result cuModuleGetFunction(void **function, void *module, const char *name) { *function = malloc(8); return 0; }
result cuFuncGetAttribute(int *value, int what, void *f) { *value = what == 0 ? 1024 : what == 4 ? 32 : 0; return 0; }
result cuOccupancyMaxActiveClusters(int *n, void *function, void *config) { *n = 1; return 0; }
result cuPointerGetAttribute(void *value, int what, size_t place) {  // 3: the address on the device
  if (what == 3) *(size_t *)value = place;
  else *(int *)value = 2;
  return 0;
}
