#!/bin/sh
# Install etcd for the tests from Debian's packages, without starting its service. Where that cannot be, say so: the tests
# that need it are skipped.
set -eu
command -v etcd > /dev/null && exit 0
skipped() {
    echo "etcd is not installed ($1): the tests that need it are skipped"
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
apt-get install -y -qq --no-install-recommends etcd-server etcd-client > /dev/null || skipped "apt-get install failed"
