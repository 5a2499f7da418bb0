"""Where tests and benchmarks find the forked ranks of the proofs."""

from throughline.train.parallel.forked import run_ranks, warm

__all__ = ["run_ranks", "warm"]
