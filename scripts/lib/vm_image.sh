# shellcheck shell=sh
# A Debian disk image for virtual machines, made of packages alone; sourced by scripts/vm-image,
# after common.sh, packages.sh and private_apt.sh.
#
# mmdebstrap makes the tree from this machine's own mirror, mke2fs fills the disk with it, extlinux
# boots it.  It has Debian's stock kernel and systemd, an ssh server, and what a host needs to be
# provisioned (sudo, rsync, Python).  It has no criuctl and no CRIU, which scripts/setup installs.
# Every machine makes its own machine id and ssh host keys when it boots for the first time.

VM_SUITE=trixie
# dbus: logins; systemd-resolved: the name server that DHCP reports.
VM_PACKAGES="initramfs-tools lz4 systemd-sysv systemd-resolved udev dbus kmod procps iproute2
    iputils-ping netbase openssh-server sudo ca-certificates rsync python3 less"
# Units that keep a machine busy after its boot, and are of no use to one that lives for minutes.
VM_MASKED="apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer
    e2scrub_all.timer e2scrub_reap.service systemd-networkd-wait-online.service ldconfig.service
    systemd-hwdb-update.service systemd-journal-catalog-update.service"
# The private half is public: only Vagrant's own boxes accept it, and Vagrant replaces it at the
# first boot.
VAGRANT_KEY="ssh-rsa AAAAB3NzaC1yc2EAAAABIwAAAQEA6NF8iallvQVp22WDkTkyrtvp9eWW6A8YVr+kz4TjGYe7gHzIw+niNltGEFHzD8+v1I2YJ6oXevct1YeS0o9HZyN1Q9qgCgzUFtdOKLv6IedplqoPkcmF0aYet2PkEDo3MlTBckFXPITAMzF8dJSIFo9D8HfdOV0IAdx4O7PtixWKn5y2hMNG0zQPyUecp4pzC6kivAIhyfHilFR61RGL+GPXQ2MWZWFYbAGjyiYJnAmCP3NOTd0jMZEnDkbUvxhMmBYSdETk1rRgm+R4LOzFUGaHqHDLKLX+FIPKcF96hrucXzcWyLbIbEgE98OHlnVYCzRdK8jlqm8tehUc9c9WhQ== vagrant insecure public key"

# security_mirror: prints the address of the machine's Debian security archive, if it has one.
security_mirror() {
    # shellcheck disable=SC2016
    apt-get indextargets --format '$(REPO_URI)' \
        'Created-By: Packages' 'Origin: Debian' 'Label: Debian-Security' 'Component: main' |
        head -n 1
}

# vm_sources: prints the apt sources of the image: the machine's own mirrors, another suite.
vm_sources() {
    mirror=$(debian_mirror)
    [ -n "$mirror" ] || {
        quietly apt-get -qq update ||
            die "apt-get update failed" \
                "Is the machine online, and do the mirrors in /etc/apt answer?"
        mirror=$(debian_mirror)
    }
    [ -n "$mirror" ] ||
        die "this machine's apt sources have no Debian archive (Origin: Debian, component main)"
    printf 'Types: deb\nURIs: %s\nSuites: %s %s-updates\nComponents: main\n%s\n' \
        "$mirror" $VM_SUITE $VM_SUITE "$(signed_by "$mirror")"
    security=$(security_mirror)
    [ -z "$security" ] ||
        printf '\nTypes: deb\nURIs: %s\nSuites: %s-security\nComponents: main\n%s\n' \
            "$security" $VM_SUITE "$(signed_by "$security")"
}

# vm_tree FOLDER: unpacks and configures the packages in FOLDER/root.
vm_tree() {
    vm_sources >"$1/sources"
    keyring=$(sed -n 's/^Signed-By: *\(\/.*\)/\1/p' "$1/sources" | head -n 1)
    # shellcheck disable=SC2016,SC2086 # mmdebstrap expands $1 in hooks; package names are words
    mmdebstrap --quiet --mode=root --variant=minbase \
        --include="$(echo linux-image-cloud-amd64 $VM_PACKAGES | tr ' ' ',')" \
        ${keyring:+--keyring="$keyring"} \
        --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='Acquire::Languages "none"' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d"' \
        --essential-hook='printf "MODULES=list\nCOMPRESS=lz4\n" >"$1/etc/initramfs-tools/conf.d/vm.conf"' \
        --essential-hook='printf "%s\n" virtio_pci virtio_blk virtio_scsi sd_mod virtio_net ext4 >"$1/etc/initramfs-tools/modules"' \
        $VM_SUITE "$1/root" "$1/sources" >"$1/log" 2>&1 || {
        tail -n 20 "$1/log" >&2
        die "mmdebstrap could not make a tree of Debian $VM_SUITE"
    }
}

# vm_furnish ROOT: writes the settings that make a bootable machine of the packages.
vm_furnish() {
    echo debian >"$1/etc/hostname"
    printf '127.0.0.1 localhost\n127.0.1.1 debian\n::1 localhost ip6-localhost\n' >"$1/etc/hosts"
    echo '/dev/vda1 / ext4 noatime 0 1' >"$1/etc/fstab"
    mkdir -p "$1/etc/systemd/network" "$1/etc/systemd/journald.conf.d" \
        "$1/etc/systemd/resolved.conf.d" "$1/etc/systemd/system/ssh.service.d"
    # A file with a lower number wins: a network of Vagrant's, or a wire between two hosts.
    printf '%s\n' '[Match]' 'Name=en* eth*' '[Network]' DHCP=ipv4 \
        LinkLocalAddressing=no IPv6AcceptRA=no \
        >"$1/etc/systemd/network/90-dhcp.network"
    printf '[Resolve]\nLLMNR=no\nMulticastDNS=no\n' >"$1/etc/systemd/resolved.conf.d/vm.conf"
    printf '[Journal]\nStorage=volatile\n' >"$1/etc/systemd/journald.conf.d/vm.conf"
    ln -sf ../run/systemd/resolve/stub-resolv.conf "$1/etc/resolv.conf"
    printf '%s\n' '[Service]' ExecStartPre= 'ExecStartPre=/usr/bin/ssh-keygen -A' \
        'ExecStartPre=/usr/sbin/sshd -t' >"$1/etc/systemd/system/ssh.service.d/keys.conf"
    printf 'UseDNS no\nGSSAPIAuthentication no\nPermitRootLogin prohibit-password\n' \
        >"$1/etc/ssh/sshd_config.d/10-vm.conf"
    # shellcheck disable=SC2086
    quietly chroot "$1" systemctl -q mask $VM_MASKED
    quietly chroot "$1" systemctl -q enable systemd-networkd systemd-resolved ssh
    rm -rf "$1"/etc/ssh/ssh_host_* "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin
    : >"$1/etc/machine-id"
    rm -f "$1/var/lib/dbus/machine-id"
    # Otherwise systemd takes the first boot for one after an update.
    touch -d tomorrow "$1/etc/.updated" "$1/var/.updated"
}

# vm_root_key ROOT FILE: lets an owner of the private half of this key log in as root.
vm_root_key() {
    install -d -m 700 "$1/root/.ssh"
    install -m 600 "$2" "$1/root/.ssh/authorized_keys"
}

# vm_vagrant ROOT: adds what Vagrant expects of a box: the user, its well-known key and sudo without
# a password.
vm_vagrant() {
    chroot "$1" useradd -m -s /bin/bash vagrant
    echo 'vagrant:vagrant' | chroot "$1" chpasswd
    echo 'vagrant ALL=(ALL) NOPASSWD: ALL' >"$1/etc/sudoers.d/vagrant"
    chmod 440 "$1/etc/sudoers.d/vagrant"
    install -d -m 700 "$1/home/vagrant/.ssh"
    echo "$VAGRANT_KEY" >"$1/home/vagrant/.ssh/authorized_keys"
    chmod 600 "$1/home/vagrant/.ssh/authorized_keys"
    chroot "$1" chown -R vagrant:vagrant /home/vagrant
}

# vm_host_settings ROOT: copies what this machine itself needs to reach its package index: its
# certificate authorities and pip's settings.
vm_host_settings() {
    authorities=${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}
    {
        [ ! -e "$authorities" ] || {
            # Under another name: the package ca-certificates writes the usual one.
            cp -L "$authorities" "$1/etc/authorities.crt"
            echo PIP_CERT=/etc/authorities.crt
        }
        names='PIP_(INDEX_URL|EXTRA_INDEX_URL|TRUSTED_HOST|DEFAULT_TIMEOUT)|https?_proxy|no_proxy'
        env | grep -E "^($names)=[^ ]*\$" || true
    } >>"$1/etc/environment"
    [ ! -e /etc/pip.conf ] ||
        sed 's#^\( *cert *= *\).*#\1/etc/authorities.crt#' /etc/pip.conf >"$1/etc/pip.conf"
}

# vm_disk FOLDER SIZE OUT: writes FOLDER/root to a disk with one partition and a boot loader, as OUT
# in qcow2 format.
vm_disk() {
    release=$(basename "$(find "$1/root/boot" -name 'vmlinuz-*' | sort -V | tail -n 1)")
    release=${release#vmlinuz-}
    mkdir -p "$1/root/boot/extlinux" "$1/mnt"
    cat >"$1/root/boot/extlinux/extlinux.conf" <<CONF
serial 0 115200
default debian
prompt 0
timeout 0
label debian
  kernel /boot/vmlinuz-$release
  initrd /boot/initrd.img-$release
  append root=/dev/vda1 ro quiet console=tty0 console=ttyS0 net.ifnames=0
CONF
    truncate -s "$2" "$1/disk"
    echo '2048,,L,*' | quietly sfdisk -q "$1/disk"
    bytes=$(($(stat -c %s "$1/disk") - 1048576))
    # Without the features that extlinux cannot read.
    quietly mke2fs -q -F -t ext4 -O '^64bit,^metadata_csum,^orphan_file' -m 1 -L root \
        -E offset=1048576 -d "$1/root" "$1/disk" $((bytes / 1024))k
    dd if=/usr/lib/syslinux/mbr/mbr.bin of="$1/disk" bs=440 count=1 conv=notrunc status=none
    # extlinux must write its own file on a mounted disk; the mount ends with its namespace in any
    # case.
    # shellcheck disable=SC2016
    quietly unshare --mount sh -euc '
        mount -o loop,offset=1048576,sizelimit="$2" "$1/disk" "$1/mnt"
        extlinux --install "$1/mnt/boot/extlinux"
        ' disk "$1" "$bytes"
    qemu-img convert -O qcow2 "$1/disk" "$3.new" && mv "$3.new" "$3"
}
