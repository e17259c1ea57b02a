# kvgate in a container: built in one stage, run in another, not as root. deploy/README.md says how to run it.
#
#   docker build -t kvgate .
#   docker run --rm -p 8080:8080 kvgate --backend http://10.0.0.7:8000
#   docker run --rm -p 8080:8080 -v ./kvgate.toml:/etc/kvgate.toml:ro kvgate -c /etc/kvgate.toml
#
# .ci/container runs these steps and the image without a container engine; it knows the instructions used here.
FROM python:3.12-slim-bookworm AS build
# No version is named: Debian has one, and drops those before it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "build>=1.2"
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE CHANGELOG.md config.example.toml ./
COPY native native
COPY router router
# The source archive, and the wheel from that: the image holds what is published.
RUN python -m build --outdir /dist
# Optional parts, such as --build-arg EXTRAS=[otel]
ARG EXTRAS=""
RUN python -m venv /opt/kvgate \
    && wheel="$(echo /dist/*.whl)" \
    && /opt/kvgate/bin/pip install --no-cache-dir "$wheel$EXTRAS"

FROM python:3.12-slim-bookworm
COPY --from=build /opt/kvgate /opt/kvgate
# Compiled files came with the build, and the root may be read-only.
ENV PATH=/opt/kvgate/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes can tell that it is not root.
USER 10001:10001
EXPOSE 8080
# Asks whichever port the flags and the file led to, with or without TLS.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["kvgate", "healthcheck"]
# Exec form: kvgate is process 1 and gets SIGTERM itself.
ENTRYPOINT ["kvgate", "serve", "--host", "0.0.0.0"]
