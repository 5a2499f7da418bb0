"""B5: activation checkpointing by operator: memory and time of GPT-3 1.3B blocks. python b5_recompute.py"""
import os, statistics, sys, time
from functools import partial
from kit import emit, step, need
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from throughline.models.config import preset
from throughline.models.init import build
P = "b5"
SMALL = bool(os.environ.get("KIT_SMALL"))
device = torch.device("cuda", 0); sync = torch.cuda.synchronize
layers, rows, length = (2, 1, 256) if SMALL else (12, 8, 2048)
a = torch.ops.aten
ATTENTION = {a._scaled_dot_product_flash_attention.default, a._scaled_dot_product_cudnn_attention.default, a._scaled_dot_product_efficient_attention.default, a._flash_attention_forward.default}
PRODUCTS = {a.mm.default, a.addmm.default, a.bmm.default}
emit(P, card=torch.cuda.get_device_name(0), torch=torch.__version__, layers=layers, rows=rows, length=length)

def contexts(every):
    """Saves attention, and of the products the first of every so many (0: none)."""
    def make():
        seen = {"forward": 0, "recompute": 0}
        def policy(ctx, op, *args, **kwargs):
            if op in ATTENTION: return CheckpointPolicy.MUST_SAVE
            if op in PRODUCTS and every == "narrow":
                return CheckpointPolicy.PREFER_RECOMPUTE if args[-1].shape[-1] >= 4 * 2048 else CheckpointPolicy.MUST_SAVE
            if op in PRODUCTS and every:
                side = "recompute" if ctx.is_recompute else "forward"; seen[side] += 1
                return CheckpointPolicy.MUST_SAVE if every == 1 or seen[side] % every else CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.PREFER_RECOMPUTE
        return create_selective_checkpoint_contexts(policy)
    return make
WAYS = {"none": None, "products and attention": contexts(1), "attention and the products but the MLP's first": contexts("narrow"), "attention alone": contexts(0), "full": "full", "attention core again (as `selective` is)": "core"}
for compiled in (False, True):
    for way, how in WAYS.items():
        with step(P, f"{way} compiled={compiled}"):
            need(12)
            torch._dynamo.reset(); torch.manual_seed(0)
            config = preset("gpt3-1.3b", layers=layers, vocab_size=512)
            model = build(config, 0).to(device, torch.bfloat16).train()
            blocks = list(model.blocks.values())
            if how == "core":
                for b in blocks: b.attention.attend = partial(checkpoint, b.attention.attend, use_reentrant=False, preserve_rng_state=False)
            def run_of(b):
                if how in (None, "core"): run = b.forward
                elif how == "full": run = partial(checkpoint, b.forward, use_reentrant=False, preserve_rng_state=False)
                else: run = partial(checkpoint, b.forward, use_reentrant=False, preserve_rng_state=False, context_fn=how)
                if not compiled: return run
                return torch.compile(lambda *args, **named: run(*args, **named), dynamic=False)
            runs = [run_of(b) for b in blocks]
            x = torch.randn(rows, length, config.width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for p in model.parameters(): p.grad = torch.zeros_like(p)
            def work():
                y = x
                for r in runs: y = r(y, None, True, {})
                peak = torch.cuda.memory_allocated()
                y.backward(torch.ones_like(y)); x.grad = None
                return peak
            began = time.perf_counter(); work(); sync(); first = time.perf_counter() - began
            work(); before = torch.cuda.memory_allocated(); torch.cuda.reset_peak_memory_stats(); held = work() - before; sync()
            taken = []
            for _ in range(2 if SMALL else 5): sync(); t = time.perf_counter(); work(); sync(); taken.append(time.perf_counter() - t)
            emit(P, way=way, compiled=compiled, ms=round(1e3 * statistics.median(taken), 2), held_gib=round(held / 2**30, 3), bytes_per_token_layer_width=round(held / (rows * length * layers * config.width), 2), peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2), first_s=round(first, 1))
            del model, blocks, runs, x
        import gc; gc.collect(); torch.cuda.empty_cache()
