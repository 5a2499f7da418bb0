"""Makes the null GPU and its environment and runs the tests there: python tests/rehearsal/start.py [words for pytest].

`make rehearse` does. Where the environment cannot be had, it says why and leaves the rehearsal out: torch's CUDA build,
ONNX Runtime's, and TensorRT's bindings (1.6 GB to download, 5 GB of disk), before the packages of the interpreter that
runs this. The null GPU is small libraries that the environment's variables put before the real ones: what runs on them
is torch and the package as they are.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES, BUILT, PLACE = (
    Path(__file__).with_name("null"),
    ROOT / "build" / "rehearsal",
    ROOT / ".venv-rehearse",
)
PYTHON = PLACE / "bin" / "python"
PACKAGES = PLACE / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
NEEDED_BYTES = 8 * 2**30  # the environment, and pip's downloads beside it
BINDINGS = "tensorrt_cu13_bindings==11.4.0.106"
LIBRARIES = {  # file -> its sources, beside the names of null/plain.txt, and the other names that it is asked for by
    "cudart_null.so": (["cudart.c"], []),
    "libcuda.so.1": (["driver.c"], ["libcuda.so"]),
    "blas_null.so": (["blas.c"], []),
    "libnvinfer.so.11": ([], ["libnvonnxparser.so.11", "libnvinfer_plugin.so.11"]),
}


def requirements() -> tuple[str, ...]:
    """What pip installs: the versions that the tests have, in their CUDA builds (=== takes no +cpu wheel)."""
    pinned = dict(
        re.findall(r"^(torch|onnxruntime)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    )
    return f"torch==={pinned['torch']}", f"onnxruntime-gpu=={pinned['onnxruntime']}", BINDINGS


def lacking() -> str:
    """Why there can be no rehearsal here; "" where there can."""
    if missing := [name for name in ("gcc", "nm") if shutil.which(name) is None]:
        return f"there is no {missing[0]}"
    if sysconfig.get_platform() != "linux-x86_64":
        return "the stub libraries are for Linux on x86-64"
    if not is_made() and (free := shutil.disk_usage(ROOT).free) < NEEDED_BYTES:
        return f"its environment needs {NEEDED_BYTES / 2**30:.0f} GiB of disk, {free / 2**30:.1f} are free"
    return ""


def is_made() -> bool:
    stamp = PLACE / "made-of.txt"
    return stamp.is_file() and stamp.read_text().split() == [sys.prefix, *requirements()]


def make_environment() -> bool:
    """Whether the environment could be made."""
    shutil.rmtree(PLACE, ignore_errors=True)
    torch, *others = requirements()
    pip = [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for words in (
        [sys.executable, "-m", "venv", PLACE],
        [*pip, "-c", ROOT / "constraints.txt", torch],
        [*pip, "--no-deps", *others],
    ):
        if subprocess.run(words).returncode:
            return False
    # only now: pip must not see, or mend, what it did not install
    (PACKAGES / "zz-packages-of-the-tests.pth").write_text(sysconfig.get_path("purelib"))
    (PLACE / "made-of.txt").write_text("\n".join([sys.prefix, *requirements()]))
    return True


def plain_names() -> dict[str, set[str]]:
    """Functions that do nothing and return 0, by library; of cuBLAS all that torch asks for and blas.c has not."""
    found: dict[str, set[str]] = {}
    for library, *names in map(str.split, (SOURCES / "plain.txt").read_text().splitlines()):
        found.setdefault(library, set()).update(names)
    asked = ["nm", "-D", "--undefined-only", PACKAGES / "torch" / "lib" / "libtorch_cuda.so"]
    names = re.findall(
        r"U (cublas\w+)", subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    )
    written = re.findall(r"\b(cublas\w+)\(", (SOURCES / "blas.c").read_text())
    return found | {"blas_null.so": set(names) - set(written)}


def build() -> None:
    """Compile the libraries, in about a second."""
    BUILT.mkdir(parents=True, exist_ok=True)
    plain = plain_names()
    headers = PACKAGES / "triton" / "backends" / "nvidia" / "include"
    for library, (sources, more_names) in LIBRARIES.items():
        generated = BUILT / f"{library}.plain.c"
        generated.write_text("".join(f"long {name}() {{ return 0; }}\n" for name in sorted(plain[library])))
        options = ["-O1", "-w", "-shared", "-fPIC", f"-I{headers}", f"-Wl,-soname,{library}"]
        files = [generated, *(SOURCES / source for source in sources)]
        subprocess.run(["gcc", *options, *files, "-o", BUILT / library, "-ldl"], check=True)
        for name in more_names:
            (BUILT / name).unlink(missing_ok=True)
            (BUILT / name).symlink_to(library)


def environment() -> dict[str, str]:
    """What puts the libraries before the real ones, and this checkout on the path; caches of its own."""
    link = ROOT / "build" / "path" / "throughline"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(ROOT)
    return os.environ | {
        "LD_PRELOAD": f"{BUILT / 'cudart_null.so'} {BUILT / 'blas_null.so'}",
        "LD_LIBRARY_PATH": str(BUILT),
        "PYTHONPATH": str(link.parent),
        "TRITON_LIBCUDA_PATH": str(BUILT),
        "TRITON_CACHE_DIR": str(BUILT / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(BUILT / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the process that has the libraries
        "THROUGHLINE_NULL_GPU": str(BUILT / "cudart_null.so"),
        "OMP_NUM_THREADS": "1",
    }


def main() -> int:
    reason = lacking()
    if not reason and not is_made() and not make_environment():
        reason = "its environment could not be installed"
    if reason:
        print(f"no rehearsal of CUDA: {reason}")
        return 0
    build()
    quiet = ["-p", "no:logging", "-p", "no:cacheprovider", "-W", "ignore::UserWarning"]
    words = [
        PYTHON,
        "-m",
        "pytest",
        *quiet,
        *(sys.argv[1:] or ["-n", "2", "tests/rehearsal"]),
    ]
    return subprocess.run(words, cwd=ROOT, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main())
