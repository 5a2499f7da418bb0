"""Where tests and benchmarks find the proof of layouts, which `throughline prove` runs too."""

from throughline.train.proof import *  # noqa: F403
