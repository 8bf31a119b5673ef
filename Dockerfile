# `bertkit serve` on a CPU, without what only training needs. Build and run:
#
#   docker build -t bertkit .
#   docker run --read-only -p 8000:8000 -v /srv/models/mrpc:/model:ro bertkit /model
#
# The second stage has the environment only, no compiler, cache or pip, and no root.
FROM python:3.11-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG UNUSED_PACKAGES="matplotlib contourpy fonttools kiwisolver scikit-learn scipy joblib"
ARG UNUSED_FILES="torch/test torch/include torch/bin/protoc* torch/bin/test_* torch/bin/*Test"
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
WORKDIR /source
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY bertkit bertkit
RUN python -m venv /opt/bertkit
ENV PATH=/opt/bertkit/bin:$PATH
RUN pip install --no-cache-dir --index-url $TORCH_INDEX "$(grep ^torch== constraints.txt)" \
    && pip install --no-cache-dir -c constraints.txt '.[serve]' \
    && pip uninstall --yes $UNUSED_PACKAGES \
    && pip uninstall --yes pip \
    && cd /opt/bertkit/lib/python3.11/site-packages \
    && rm -rf $UNUSED_FILES

FROM python:3.11-slim
COPY --from=build /opt/bertkit /opt/bertkit
RUN useradd --uid 10001 --no-create-home bertkit
USER 10001
ENV PATH=/opt/bertkit/bin:$PATH HOME=/tmp
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=120s CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["bertkit", "serve", "--host", "0.0.0.0", "--port", "8000"]
