#!/bin/sh
# Install what the tests need besides Python packages, from Debian's: etcd, without starting its service, and iproute2 for
# network namespaces. Where that cannot be, say so: the tests that need it are skipped.
set -eu
wanted=""
command -v etcd > /dev/null && command -v etcdctl > /dev/null || wanted="etcd-server etcd-client"
command -v ip > /dev/null && command -v tc > /dev/null || wanted="$wanted iproute2"
[ -n "$wanted" ] || exit 0
skipped() {
    echo "not installed: $wanted ($1): the tests that need it are skipped"
    exit 0
}
[ "$(id -u)" = 0 ] || skipped "that needs root"
command -v apt-get > /dev/null || skipped "there is no apt-get"
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' > $policy
    chmod 755 $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || skipped "apt-get update failed"
# shellcheck disable=SC2086 (a list of words)
apt-get install -y -qq --no-install-recommends $wanted > /dev/null || skipped "apt-get install failed"
