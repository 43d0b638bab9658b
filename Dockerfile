# The daemon alone, what follows Kubernetes clusters, PostgreSQL, OpenID Connect and traces, without root. The jail
# needs no privilege: it works under Docker's default seccomp profile, with all capabilities dropped. BASE may be any
# image with Python 3.11 or newer and venv, such as one that your organisation has signed:
# --build-arg BASE=registry.example/python@sha256:...
ARG BASE=python:3.13-slim
FROM ${BASE} AS needs
WORKDIR /source
COPY pyproject.toml ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['server'], \
*p['optional-dependencies']['kubernetes'], *p['optional-dependencies']['postgres'], \
*p['optional-dependencies']['otel'], *p['optional-dependencies']['oidc'], \
*p['optional-dependencies']['nvml'], sep='\n')" > needs.txt

FROM ${BASE} AS dependencies
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin moorage \
    && install --directory --owner moorage --group moorage --mode 0700 /var/lib/moorage
COPY --from=needs /source/needs.txt /opt/moorage/
# What it needs is a layer of its own: a change of the source installs nothing of it again.
RUN python -m venv /opt/moorage \
    && /opt/moorage/bin/pip install --no-cache-dir -r /opt/moorage/needs.txt

FROM dependencies AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY server server
COPY policies policies
COPY clients clients
RUN /opt/moorage/bin/pip install --no-cache-dir --no-deps --prefix /opt/program .

FROM dependencies AS program
COPY --from=build /opt/program /opt/moorage
ENV PATH=/opt/moorage/bin:$PATH \
    PYTHONUNBUFFERED=1
USER moorage
VOLUME /var/lib/moorage
STOPSIGNAL SIGTERM

# docker build --target agent: an agent, whose workloads run in its container, and end with it.
FROM program AS agent
ENV MOORAGE_AGENT_DATA=/var/lib/moorage
ENTRYPOINT ["moored", "agent"]

FROM program AS server
ENV MOORAGE_DATA_DIR=/var/lib/moorage \
    MOORAGE_HOST=0.0.0.0
# Beyond loopback the daemon refuses to start without MOORAGE_TOKENS=tenant:token,... and either
# MOORAGE_TLS_CERT and MOORAGE_TLS_KEY or MOORAGE_INSECURE_PLAINTEXT.
EXPOSE 8765 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 CMD ["moored", "health"]
ENTRYPOINT ["moored"]
CMD ["serve"]
