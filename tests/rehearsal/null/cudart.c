// The CUDA runtime without a GPU: questions about a device are answered, memory is given, kernels are not run.
//
// Memory of a device is address space of the host, which costs nothing until it is touched, and only copies touch it.
// Preloaded, these functions come before libcudart's; a function that is not here is the real one, which finds no driver.
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cards.h"

enum { SPANS = 1 << 16, PAGE = 4096 };
enum count { LAUNCHES, WAITS, PAGEABLE, GRAPHS, COUNTS };

static struct span { char *start; size_t bytes; int device; } spans[SPANS];  // device -1: page-locked memory of the host
static int last;  // spans in use lie below it
static size_t used[CARDS];
static long counts[COUNTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static cudaStream_t captured;  // between the begin and the end of a CUDA graph nothing may wait for its stream

long null_count(int what) { return counts[what]; }

static cudaError_t keep(void **place, size_t bytes, int device) {
  size_t whole = (bytes + PAGE) / PAGE * PAGE;
  pthread_mutex_lock(&lock);
  int at = 0;
  while (at < SPANS && spans[at].start) at++;
  int room = at < SPANS && (device < 0 || used[device] + whole <= (size_t)card_of(device)->memory_gib << 30);
  void *start = MAP_FAILED;
  if (room) start = mmap(0, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start != MAP_FAILED) {
    spans[at] = (struct span){start, whole, device};
    if (device >= 0) used[device] += whole;
    if (at >= last) last = at + 1;
    *place = start;
  }
  pthread_mutex_unlock(&lock);
  return start == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}

static cudaError_t let_go(void *start) {
  pthread_mutex_lock(&lock);
  for (int at = 0; start && at < last; at++)
    if (spans[at].start == start) {
      munmap(start, spans[at].bytes);
      if (spans[at].device >= 0) used[spans[at].device] -= spans[at].bytes;
      spans[at].start = 0;
    }
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}

static struct span *span_of(const void *place) {  // NULL: pageable memory of the host
  for (int at = 0; at < last; at++)
    if (spans[at].start && (char *)place >= spans[at].start && (char *)place < spans[at].start + spans[at].bytes)
      return &spans[at];
  return 0;
}

static cudaError_t wait(cudaStream_t stream) {
  counts[WAITS]++;
  return captured && captured == stream ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

// Devices
cudaError_t cudaGetDeviceCount(int *n) { *n = only() < 0 ? CARDS : 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { if (a) *a = 0; if (b) *b = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return cudaSuccess; }
cudaError_t cudaDeviceSynchronize(void) { return wait(captured); }
cudaError_t cudaMemGetInfo(size_t *left, size_t *all) {
  *all = (size_t)card_of(current)->memory_gib << 30;
  *left = *all - used[current];
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  const struct card *card = card_of(device);
  memset(p, 0, sizeof *p);
  strcpy(p->name, card->name);
  p->major = card->capability / 10, p->minor = card->capability % 10;
  p->totalGlobalMem = (size_t)card->memory_gib << 30, p->l2CacheSize = card->l2_mib << 20;
  p->multiProcessorCount = card->processors, p->warpSize = 32;
  p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = card->threads, p->maxBlocksPerMultiProcessor = 16;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = card->shared_of_block, p->sharedMemPerMultiprocessor = card->shared_of_processor;
  for (int i = 0; i < 3; i++) p->maxThreadsDim[i] = i < 2 ? 1024 : 64, p->maxGridSize[i] = i ? 65535 : 2147483647;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr what, int device) {
  struct cudaDeviceProp p;
  cudaGetDeviceProperties(&p, device);
  switch (what) {  // a 0 where a kernel's host code divides by it ends the process
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// Streams and events: all that was asked for is done at once
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  static size_t made;
  *stream = (cudaStream_t)(__sync_add_and_fetch(&made, 1) * PAGE);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return wait(s); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = malloc(8); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = malloc(8); return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return wait(0); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }

// CUDA graphs: captures and replays are counted; a wait inside a capture is refused, as a card does
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { captured = s; return cudaSuccess; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { captured = 0; *g = malloc(8); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status) {
  *status = captured && captured == s ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  if (id) *id = 1;
  if (n) *n = 0;
  return cudaStreamIsCapturing(s, status);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
  *e = malloc(8);
  return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { counts[GRAPHS]++; return cudaSuccess; }
cudaError_t cudaGraphDestroy(cudaGraph_t g) { free(g); return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t e) { free(e); return cudaSuccess; }

// Memory
cudaError_t cudaMalloc(void **place, size_t bytes) { return keep(place, bytes, current); }
cudaError_t cudaFree(void *place) { return let_go(place); }
cudaError_t cudaHostAlloc(void **place, size_t bytes, unsigned flags) { return keep(place, bytes, -1); }
cudaError_t cudaFreeHost(void *place) { return let_go(place); }
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  memcpy(to, from, bytes);
  return wait(0);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t s) {
  if (kind == cudaMemcpyDeviceToDevice) return cudaSuccess;  // zeros over zeros: no page is touched
  if (!span_of(to) || !span_of(from)) counts[PAGEABLE]++;
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, 0); }
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t s) {
  if (bytes < 1 << 20) memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *place) {
  const struct span *span = span_of(place);
  memset(a, 0, sizeof *a);
  a->type = !span ? cudaMemoryTypeUnregistered : span->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = span && span->device >= 0 ? span->device : 0;
  if (span) *(span->device < 0 ? &a->hostPointer : &a->devicePointer) = (void *)place;
  return cudaSuccess;
}

// Kernels
cudaError_t cudaLaunchKernel(const void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  counts[LAUNCHES]++;
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(void *f, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t s) {
  return cudaLaunchKernel(f, grid, block, arguments, shared, s);  // what nvcc makes of <<<...>>> since CUDA 13
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **arguments) {
  counts[LAUNCHES]++;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = card_of(current)->capability;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) {
  *n = 8;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned g) {
  *n = 8;
  return cudaSuccess;
}
