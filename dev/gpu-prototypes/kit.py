"""Lines of results, and steps that never end a script."""
import json, os, sys, time, traceback
from pathlib import Path
OUT = Path(os.environ.get("OUT", "build/gpu-prototypes")); OUT.mkdir(parents=True, exist_ok=True)
START = time.monotonic()
SECONDS = float(os.environ.get("KIT_SECONDS", "1e9"))
def left(): return SECONDS - (time.monotonic() - START)
def emit(_part, **line):
    line = {"part": _part, "at": round(time.monotonic() - START, 1), **line}
    text = json.dumps(line, default=str)
    with open(OUT / f"{_part}.jsonl", "a") as f: f.write(text + "\n")
    print(text, flush=True)
class Skip(Exception): pass
def need(s):
    if left() < s: raise Skip(f"{left():.0f} s left, {s} needed")
class step:
    def __init__(self, part, name): self.part, self.name = part, name
    def __enter__(self): self.t = time.monotonic(); return self
    def __exit__(self, kind, error, trace):
        took = round(time.monotonic() - self.t, 1)
        if kind is None: return False
        if issubclass(kind, (KeyboardInterrupt, SystemExit)): return False
        emit(self.part, failed=self.name, took=took, error=f"{kind.__name__}: {error}"[:900], where=[] if kind is Skip else traceback.format_exception(kind, error, trace)[-2:])
        try:
            import gc, torch; gc.collect(); torch.cuda.is_available() and torch.cuda.empty_cache()
        except Exception: pass
        return True
if os.environ.get("KIT_SMALL"):
    import torch
    torch.backends.cuda.enable_cudnn_sdp(False)
