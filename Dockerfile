# kvgate in a container: built in one stage, run in another, not as root.
#
#   docker build -t kvgate .
#   docker run --rm -p 8080:8080 kvgate --backend http://10.0.0.7:8000
#   docker run --rm -p 8080:8080 -v ./kvgate.toml:/etc/kvgate.toml:ro kvgate -c /etc/kvgate.toml
FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY native native
COPY router router
RUN python -m venv /opt/kvgate && /opt/kvgate/bin/pip install --no-cache-dir .

FROM python:3.12-slim-bookworm
RUN useradd --system --no-create-home --uid 10001 kvgate
COPY --from=build /opt/kvgate /opt/kvgate
ENV PATH=/opt/kvgate/bin:$PATH PYTHONDONTWRITEBYTECODE=1
USER 10001
EXPOSE 8080
# Alive is what this asks, not whether engines are up: a gateway without engines must not be restarted for it. The data
# port has to stay 8080 for it; map it to another outside, or give --health-cmd.
HEALTHCHECK --interval=10s --timeout=2s --start-period=5s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/livez', timeout=1)"]
# Exec form: kvgate is PID 1 and gets SIGTERM itself.
ENTRYPOINT ["kvgate", "serve", "--host", "0.0.0.0"]
