// The cards of the null GPU, by device number: one of each capability, and a small one to run out of memory on.
// Facts: NVIDIA's CUDA programming guide, technical specifications by compute capability, and the cards' data sheets.
#include <stddef.h>
#include <stdlib.h>

struct card {
  const char *name;
  int capability, processors, threads, shared_of_processor, shared_of_block, l2_mib, memory_gib;
};

static const struct card cards[] = {
    {"Tesla V100-SXM2-16GB", 70, 80, 2048, 98304, 98304, 6, 16},
    {"Tesla T4", 75, 40, 1024, 65536, 65536, 4, 16},
    {"NVIDIA A100-SXM4-80GB", 80, 108, 2048, 167936, 166912, 40, 80},
    {"NVIDIA H100 80GB HBM3", 90, 132, 2048, 233472, 232448, 50, 80},
    {"NVIDIA B200", 100, 148, 2048, 233472, 232448, 126, 180},
    {"NVIDIA A100-SXM4-80GB", 80, 108, 2048, 167936, 166912, 40, 2},
};
enum { CARDS = sizeof cards / sizeof *cards };

static int only(void) {  // NULL_GPU_CARD in the environment: the one card that is there; -1: all are
  const char *named = getenv("NULL_GPU_CARD");
  return named ? atoi(named) : -1;
}
static const struct card *card_of(int device) { return &cards[only() < 0 ? device : only()]; }
