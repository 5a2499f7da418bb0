"""B4: fp8 by torchao's recipes on blocks of GPT-3 1.3B and Llama 8B shapes, compiled, forward and backward. python b4_fp8.py [--warm] shape..."""
import os, statistics, sys, time
from kit import emit, step, need
import torch
from throughline.models.config import GPTConfig, preset
from throughline.models.init import build
from throughline.models.rotary import layer_tables
P = "b4"
SMALL = bool(os.environ.get("KIT_SMALL"))
warm = "--warm" in sys.argv
words = [w for w in sys.argv[1:] if not w.startswith("-")]
shapes, only = words[:1], words[1:]
device = torch.device("cuda", 0)
sync = torch.cuda.synchronize
emit(P, card=torch.cuda.get_device_name(0), torch=torch.__version__, shapes=shapes, warm=warm)
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
import torchao; emit(P, torchao=getattr(torchao, "__version__", "?"))
CONFIGS = {
    "1.3b": (lambda n: preset("gpt3-1.3b", layers=n, vocab_size=512), 8, 2048, 6),
    "8b": (lambda n: GPTConfig(vocab_size=512, sequence_length=8192, layers=n, width=4096, heads=32, kv_heads=8, mlp_width=14336, positions="rotary", norm="rmsnorm", activation="silu", gated=True, bias=False, tied=False), 2, 8192, 3),
}
forms = ["bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp", "tensorwise, weights by power of 2"]
for shape in shapes:
    make, rows, length, layers = CONFIGS[shape]
    if SMALL: rows, length, layers = 1, 256, 1
    for form in only or forms:
        with step(P, f"{shape} {form}"):
            need(9)
            torch._dynamo.reset(); torch.manual_seed(0)
            config = make(layers)
            with torch.device(device): model = build(config, 0)
            model = model.to(device, torch.bfloat16).train()
            blocks = list(model.blocks.values())
            if form != "bf16":
                how = Float8LinearConfig.from_recipe_name(form) if "," not in form else Float8LinearConfig(round_scales_to_power_of_2=True)
                for block in blocks: convert_to_float8_training(block, config=how)
            x = torch.randn(rows, length, config.width, device=device, dtype=torch.bfloat16, requires_grad=True)
            tables = layer_tables(config, torch.arange(length, device=device), x.dtype)
            compiled = [torch.compile(block.forward, dynamic=False) for block in blocks]
            def work():
                y = x
                for run in compiled: y = run(y, None, True, tables)
                y.backward(torch.ones_like(y)); x.grad = None
                for p in model.parameters(): p.grad = None
            began = time.perf_counter(); work(); sync(); first = time.perf_counter() - began
            if warm: continue
            torch.cuda.reset_peak_memory_stats()
            taken = []
            for _ in range(3): work()
            for _ in range(2 if SMALL else 8):
                sync(); t = time.perf_counter(); work(); sync(); taken.append(time.perf_counter() - t)
            weights = sum(p.numel() for b in blocks for n, p in b.named_parameters() if p.dim() == 2)
            flops = 6 * weights * rows * length
            ms = 1e3 * statistics.median(taken)
            emit(P, shape=shape, form=form, layers=layers, tokens=rows * length, ms=round(ms, 3), spread=[round(1e3 * min(taken), 3), round(1e3 * max(taken), 3)], tflops_of_products=round(flops / ms / 1e9, 1), first_s=round(first, 1), gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))
            del model, blocks, x, compiled
        import gc; gc.collect(); torch.cuda.empty_cache()
