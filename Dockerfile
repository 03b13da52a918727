# fleetbed in a container that can limit its clients by cgroups.
#
#   docker build -t fleetbed --build-arg TORCH_INDEX=URL .     # URL: pip's index of torch's CPU builds, as pytorch.org gives it
#   docker run --rm --privileged --cgroupns=private -v "$PWD/runs:/runs" fleetbed run demo --out /runs/demo
#
# The container needs a cgroup tree of its own (--cgroupns=private) that it may write to (--privileged); fleetbed moves itself into
# a group of that tree and makes one for every client. Without these options it runs too, with the limits that `doctor` lists.
# Unverified: buildah 1.28 read this file and copied the sources, but without a base image at hand it could not install them; so
# neither the image nor the limits inside a container were tried. A test checks the syntax.
FROM python:3.11-slim

# without it pip takes the ordinary build of torch, which brings 2.7 GB of CUDA
ARG TORCH_INDEX=""

WORKDIR /src
COPY . .
RUN if [ -n "$TORCH_INDEX" ]; then \
      pip install --no-cache-dir -c constraints.txt --index-url "$TORCH_INDEX" torch torchvision; \
    fi \
 && pip install --no-cache-dir -c constraints.txt .

WORKDIR /runs
ENTRYPOINT ["fleetbed"]
CMD ["doctor"]
