# Throughline in a container. Four images from one file:
#   docker build --target cpu   -t throughline:cpu   .   everything on the CPU
#   docker build --target cuda  -t throughline:cuda  .   everything on a CUDA GPU
#   docker build --target t4    -t throughline:t4    .   that, and what builds and serves TensorRT engines
#   docker build --target serve -t throughline:serve .   an endpoint for ONNX artifacts on the CPU, without torch
# Beside the base image, serve installs 221 MB of packages (du -sm of pip install --target with containers/serve.txt,
# 2026-11-22, onnxruntime most of them) and cpu 1,372 MiB (files of all that it requires but tokie, 2026-11-23, torch 722 of
# them); cuda adds what torch's default wheel brings (of torch 2.15.0, by du -sm: torch 1,188 MB, NVIDIA's libraries 3,055,
# Triton 999). Sizes of built images are to be added where an engine built them.
# Each runs as a user without rights; models are mounted at /models.

FROM python:3.11.13-slim-bookworm@sha256:86adf8dbadc3d6e82ee5dd2c74bec2e1c2467cdad47886280501df722372d2e1 AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 10001 throughline && mkdir /models && chown throughline /models
WORKDIR /opt/throughline
# what is needed stands before the sources in every stage: an edit of those installs nothing else again
COPY constraints.txt pyproject.toml ./
COPY containers containers

FROM base AS needs
RUN python containers/needs.py > needs && python containers/needs.py tensorrt > needs-tensorrt

FROM needs AS cpu
RUN pip install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && xargs --delimiter '\n' pip install -c constraints.txt < needs
COPY . .
RUN pip install --no-deps .
USER throughline
WORKDIR /models
ENTRYPOINT ["throughline"]
CMD ["--help"]

FROM needs AS gpu
# torch.compile: Triton builds its launcher with a C compiler, Inductor what stays on the host with a C++ one; Python's headers
# are in the base image
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
# the default wheels of torch carry the CUDA libraries; the host gives the driver (nvidia-container-toolkit).
# onnxruntime-gpu takes the place of onnxruntime, whose files have the same names
RUN xargs --delimiter '\n' pip install -c constraints.txt < needs \
    && pip uninstall --yes onnxruntime && pip install onnxruntime-gpu==1.31.1

FROM gpu AS cuda
COPY . .
RUN pip install --no-deps .
USER throughline
WORKDIR /models
ENTRYPOINT ["throughline"]
CMD ["--help"]

FROM gpu AS t4
RUN xargs --delimiter '\n' pip install -c constraints.txt < needs-tensorrt
COPY . .
RUN pip install --no-deps .
USER throughline
WORKDIR /models
ENTRYPOINT ["throughline"]
CMD ["--help"]

FROM base AS serve
# what serving an ONNX artifact imports, and nothing else: no torch, no datasets
RUN pip install -c constraints.txt -r containers/serve.txt
COPY . .
RUN pip install --no-deps .
USER throughline
WORKDIR /models
EXPOSE 8000
# the server itself: a model of gigabytes that is still loading is no sick container, and /ready says when it takes requests
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["throughline", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["/models/model"]
