#!/usr/bin/env bash
# A machine with two sockets, emulated by qemu: see CONTRIBUTING.md.
#
#   machine.sh needs            the packages of Debian that building and running need
#   machine.sh build            make its kernel and its system; as root, on Debian, with a network
#   machine.sh run JOB OUT      start it, run JOB/start inside (as /job/start), write OUT/console
#                               and what the job writes to /dev/ttyS1 to OUT/results
#
# It is kept in $GPUAFF_NUMA_MACHINE, or ~/.cache/gpuaff/numa-machine.
set -euo pipefail
home=${GPUAFF_NUMA_MACHINE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpuaff/numa-machine}

packages='qemu-system-x86 debootstrap cpio wget'
inside='python3,numactl'

# The mirror that apt here takes this release's packages from.
mirror() {
  apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' 'Component: main' |
    awk -v release="$1" '$1 == release { print $2; exit }'
}

kernel() { # not installed here: only its file is needed
  local name
  name=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" { print $2; exit }')
  (cd "$1" && apt-get -qq -o APT::Sandbox::User=root download "$name")
  dpkg-deb --fsys-tarfile "$1/$name"_*.deb | tar -x -C "$1" ./boot
  mv "$1"/boot/vmlinuz-* "$home/vmlinuz"
}

system() {
  . /etc/os-release
  eval "$(apt-config shell http_proxy Acquire::http::Proxy)"
  [ -z "${http_proxy:-}" ] || export http_proxy
  debootstrap --variant=minbase --include="$inside" "$VERSION_CODENAME" "$1" \
    "$(mirror "$VERSION_CODENAME")" >"$home/debootstrap.log" ||
    { tail -n 20 "$home/debootstrap.log" >&2; return 1; }
  cat >"$1/init" <<'INIT'
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t cgroup2 cgroup /sys/fs/cgroup
PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp /job/start
echo "the job ended: $?"
echo o >/proc/sysrq-trigger # power off
sleep 60
INIT
  chmod +x "$1/init"
  # Its Python, for those who bring packages along.
  (cd "$1/usr/bin" && ls python3.* | grep -x 'python3\.[0-9]*' | cut -c7-) >"$home/python"
}

build() {
  local work
  mkdir -p "$home"
  apt-get -qq update
  work=$(mktemp -d "$home/build.XXXXXX")
  trap 'rm -rf --one-file-system "'"$work"'"' EXIT
  kernel "$work"
  system "$work/root"
  (cd "$work/root" && find . -xdev \
    -not -path './usr/share/doc/*' -not -path './usr/share/man/*' -not -path './usr/share/locale/*' \
    -not -path './usr/share/zoneinfo/*' -not -path './usr/share/i18n/*' -not -path './var/cache/*' \
    -not -path './var/lib/*' -not -path './usr/lib/x86_64-linux-gnu/gconv/*' |
    cpio -o -H newc --quiet) >"$work/system.cpio"
  mv "$work/system.cpio" "$home/system.cpio" # last: it says that the machine is there
}

# Defences of real processors cost an emulated one a lot; and while the kernel looks for memory to
# move to another node by itself, move_pages(2) does not tell where it is.
plain='mitigations=off numa_balancing=disable'

# 2 sockets x 2 L3 domains x 2 cores x 2 threads. Linux could take 16 more CPUs than there are, and
# says so in each process's Cpus_allowed_list. The display devices are by a vendor that makes GPUs
# (1002) on NUMA nodes 1, 0, 0, 1 in the order of their addresses, and by another on none.
run() {
  local work
  work=$(mktemp -d)
  trap 'rm -rf "'"$work"'"' EXIT
  mkdir -p "$2" "$work/tree"
  cp -rL "$1" "$work/tree/job"
  cp "$home/system.cpio" "$work/initrd"
  (cd "$work/tree" && find job | cpio -o -H newc --quiet) >>"$work/initrd"
  timeout "${GPUAFF_NUMA_MACHINE_TIMEOUT:-900}" qemu-system-x86_64 \
    -machine q35 -accel tcg,thread=multi -cpu max,vendor=GenuineIntel -m 3G \
    -smp 16,sockets=2,dies=2,cores=2,threads=2 \
    -object memory-backend-ram,id=m0,size=1536M -object memory-backend-ram,id=m1,size=1536M \
    -numa node,nodeid=0,cpus=0-7,memdev=m0 -numa node,nodeid=1,cpus=8-15,memdev=m1 \
    -numa dist,src=0,dst=1,val=21 \
    -device pxb-pcie,id=x0,bus_nr=32,numa_node=1,bus=pcie.0 \
    -device pxb-pcie,id=x1,bus_nr=64,numa_node=0,bus=pcie.0 \
    -device pxb-pcie,id=x2,bus_nr=96,numa_node=1,bus=pcie.0 \
    -device pcie-root-port,id=p0,bus=x0,chassis=1,slot=1 -device ati-vga,bus=p0 \
    -device pcie-root-port,id=p1,bus=x1,chassis=2,slot=2 -device ati-vga,bus=p1 \
    -device pcie-root-port,id=p2,bus=x1,chassis=3,slot=3 -device ati-vga,bus=p2 \
    -device pcie-root-port,id=p3,bus=x2,chassis=4,slot=4 -device ati-vga,bus=p3 \
    -device secondary-vga,bus=pcie.0 \
    -kernel "$home/vmlinuz" -initrd "$work/initrd" \
    -append "console=ttyS0 quiet panic=-1 rdinit=/init possible_cpus=32 $plain" \
    -display none -nodefaults -no-reboot \
    -serial "file:$2/console" -serial "file:$2/results" </dev/null
}

case "${1:-}" in
  needs) echo "$packages" ;;
  build) build ;;
  run) run "$2" "$3" ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
