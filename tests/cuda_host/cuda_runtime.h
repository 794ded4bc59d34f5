/* In place of CUDA's header, for a build of the engine's host code that runs without a GPU: what
 * that code calls, with CUDA's names and meanings. Work is done late, stream by stream in a random
 * interleaving that keeps the order of streams and events (runtime.c). */
#ifndef BT_TESTS_CUDA_HOST_RUNTIME_H
#define BT_TESTS_CUDA_HOST_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorNotReady = 600,
    cudaErrorUnknown = 999
} cudaError_t;
typedef struct cuda_stream *cudaStream_t;
typedef struct cuda_event *cudaEvent_t;
typedef struct cuda_graph *cudaGraph_t;
typedef struct cuda_graph *cudaGraphExec_t;
typedef void (*cudaHostFn_t)(void *);
struct cudaDeviceProp {
    char name[256];
    int major, minor;
};
struct cudaMemcpyAttributes {
    int srcAccessOrder;
    unsigned flags;
};
enum cudaMemcpyKind {
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3
};
enum {
    cudaMemcpySrcAccessOrderStream = 1,
    cudaMemcpyFlagPreferOverlapWithCompute = 1,
    cudaHostRegisterPortable = 1,
    cudaStreamNonBlocking = 1,
    cudaEventDisableTiming = 2,
    cudaStreamCaptureModeThreadLocal = 1
};
#define CUDART_CB

cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *most);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t e);

cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaMallocHost(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaFreeHost(void *p);
cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags);
cudaError_t cudaHostUnregister(void *p);
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind);
cudaError_t cudaMemset(void *p, int v, size_t bytes);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t s);
cudaError_t cudaMemcpyBatchAsync(void *const *to, const void *const *from, const size_t *bytes,
                                 size_t n, struct cudaMemcpyAttributes *attrs, size_t *first,
                                 size_t n_attrs, cudaStream_t s);
cudaError_t cudaMemsetAsync(void *p, int v, size_t bytes, cudaStream_t s);

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags);
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *arg);
cudaError_t cudaEventCreate(cudaEvent_t *e);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s);
cudaError_t cudaEventQuery(cudaEvent_t e);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);

cudaError_t cudaStreamBeginCapture(cudaStream_t s, int mode);
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t x, cudaStream_t s);
cudaError_t cudaGraphDestroy(cudaGraph_t g);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t x);

/* Not CUDA's: fn(args) later, in the stream's order; args are copied. */
void cuda_host_launch(cudaStream_t s, void (*fn)(const void *args), const void *args, size_t bytes);

#endif
