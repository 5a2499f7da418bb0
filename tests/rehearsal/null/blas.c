// cuBLAS without a GPU: the functions whose answers are read. What else torch asks for by name returns 0 and is
// generated beside this by start.py. A heuristic must have found an algorithm: layouts that cuBLASLt would refuse pass.
#include <stdlib.h>
#include <string.h>

int cublasCreate_v2(void **handle) { *handle = malloc(8); return 0; }
int cublasLtCreate(void **handle) { *handle = malloc(8); return 0; }
int cublasGetStream_v2(void *handle, void **stream) { *stream = 0; return 0; }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
const char *cublasGetStatusString(int status) { return "an error of the null cuBLAS"; }
int cublasLtMatmulDescCreate(void **made, int type, int scale) { *made = calloc(1, 512); return 0; }
int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long rows, unsigned long columns, long stride) {
  *made = calloc(1, 512);
  return 0;
}
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 512); return 0; }
int cublasLtMatmulDescDestroy(void *made) { free(made); return 0; }
int cublasLtMatrixLayoutDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulPreferenceDestroy(void *made) { free(made); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int asked, char *results, int *found) {
  memset(results, 0, 128);
  *found = 1;
  return 0;
}
