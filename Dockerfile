# Build:           docker build -t stackexp .
# Quickstart:      docker run --rm -v "$PWD:/work" stackexp
# Anything else:   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" stackexp fit --config CONFIG
ARG BASE=python:3.12-slim
FROM ${BASE}

# git: runs record the commit. gcc: torch.compile and Triton compile with it.
RUN apt-get update && apt-get install -y --no-install-recommends git gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && git config --system --add safe.directory /opt/stackexp

# Install the dependencies first, so that changes of the code reuse this layer.
WORKDIR /opt/stackexp
COPY setup.py pyproject.toml README.md ./
COPY stackexp/__init__.py stackexp/
RUN pip install --no-cache-dir -e '.[eval]'
COPY . .

WORKDIR /work
ENTRYPOINT ["python", "-m", "stackexp"]
CMD ["fit", "--config", "quickstart"]
