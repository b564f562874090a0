#!/bin/sh
# Download the SSH server of Debian 13 (OpenSSH 10) and its libraries into a folder. Nothing else on this machine changes.
#   newer_sshd.sh TARGET        makes the program TARGET/sshd
# OpenSSH bans clients since 9.8. The download needs apt-get and the package debian-archive-keyring.
set -eu
mkdir -p "$1"
target=$(cd "$1" && pwd)
root=$target/root
mkdir -p "$root" "$target/apt/lists/partial" "$target/apt/archives/partial" "$target/debs" "$target/programs"

echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" \
  >"$target/apt/sources.list"
apt() {
  apt-get -qq -o "Dir::Etc::sourcelist=$target/apt/sources.list" -o Dir::Etc::sourceparts=- \
    -o "Dir::State::lists=$target/apt/lists" -o "Dir::Cache=$target/apt" -o APT::Sandbox::User= "$@"
}
apt update
cd "$target/debs"
# With /trixie, as the machine's own packages may be newer or older.
for package in openssh-server openssh-sftp-server libaudit1 libc6 libcap-ng0 libcom-err2 libcrypt1 libgssapi-krb5-2 \
  libk5crypto3 libkeyutils1 libkrb5-3 libkrb5support0 libpam0g libpcre2-8-0 libselinux1 libsqlite3-0 libssl3t64 \
  libwrap0 libwtmpdb0 libzstd1 zlib1g; do
  set -- "$@" "$package/trixie"
done
shift
apt download "$@"
for deb in *.deb; do dpkg-deb --extract "$deb" "$root"; done

# The programs need Debian 13's libc. A loader that is started under a program's name gives the process this name.
loader=$(find "$root/usr/lib" -name 'ld-linux*.so.*' -type f)
libraries=$(dirname "$(find "$root/usr/lib" -name libcrypto.so.3)")
wrap() { # NAME PROGRAM [OPTION...]
  name=$1 program=$2
  shift 2
  ln -sf "$loader" "$target/programs/$name"
  printf '#!/bin/sh\nexec %s --library-path %s --argv0 "$0" %s %s "$@"\n' \
    "$target/programs/$name" "$libraries" "$root/$program" "$*" >"$target/$name"
  chmod +x "$target/$name"
}
wrap sshd-session usr/lib/openssh/sshd-session
wrap sshd-auth usr/lib/openssh/sshd-auth
wrap sshd usr/sbin/sshd -o "SshdSessionPath=$target/sshd-session" -o "SshdAuthPath=$target/sshd-auth"
cd "$target"
rm -r apt debs
"$target/sshd" -V
