# Two images: `docker build --target cpu .` and `docker build --target cuda .`; their steps are what `make` runs.
#   docker run --rm --shm-size=2g -v "$PWD/runs:/app/runs" embodied-rl train total_steps=20_000
ARG BASE=debian:12-slim

FROM ${BASE} AS system
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils ca-certificates git make python3 python3-venv libegl1 libgl1 libglib2.0-0 libx11-6 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/embodied_rl
COPY Makefile setup.cfg setup.py pyproject.toml README.md LICENSE requirements.train.lock ./
COPY scripts scripts
COPY embodied_rl embodied_rl
COPY configs configs
COPY assets assets
ENV PATH=/opt/embodied_rl/.venv/bin:$PATH

FROM system AS cpu
RUN make setup TORCH=cpu && rm -rf ~/.cache /var/lib/apt/lists/*
WORKDIR /app
ENTRYPOINT ["embodied-rl"]
CMD ["train"]

# The driver's libraries come from the host, by NVIDIA's container toolkit: docker run --gpus all …
FROM system AS cuda
RUN make setup && rm -rf ~/.cache /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
WORKDIR /app
ENTRYPOINT ["embodied-rl"]
CMD ["train"]
