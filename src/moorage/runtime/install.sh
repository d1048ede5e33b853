#!/usr/bin/env bash
# Lays the programs that moorage stands on (criu, runc, etcd with its tools, nft, ip, ss) under one folder, with the libraries that they
# need, and touches nothing else of the machine: no package is installed, no service started.
#
#   install.sh [--prefix DIR] [--sources FILE] [--force]
#
# --prefix   where; default $MOORAGE_RUNTIME, else /opt/moorage/runtime
# --sources  an apt source file (deb822) to take the packages from, in place of the machine's own with the suite replaced
# --force    build anew although everything is there (for security updates)
#
# A program that this machine has installed in a version that is new enough is linked to. The rest is unpacked from the
# machine's own release if that is new enough, else from the newest one of the same archive (Debian: sid, Ubuntu: devel).
# Those are linked against a newer C library than the machine's, so each gets the private copy of its libraries as
# interpreter and search path. RPATH and not RUNPATH: the latter is not used for what the libraries themselves need. A
# wrapper script that starts the loader would not do: runc starts itself again through /proc/self/exe.
#
# DIR becomes a link to a folder beside it that is built aside and tried first, so a change is one rename, and programs
# that run on from the folder before it find their libraries. The folder before the last is removed.
set -Eeuo pipefail

recipe=1 # raise when what is laid changes, so that older folders are built anew

# program, package, least version. CRIU: kernels from 6.16 need 4.2. runc: time namespaces; 1.2.8, and 1.3.3 of the
# series 1.3, refuse a /dev/null and a /proc that are none. etcd: 3.5.0 to 3.5.2 can lose data (an installed 3.4 works
# too, but nothing older than 3.5.3 is fetched). nft: `destroy`.
table="
criu criu 4.2
runc runc 1.2.8
etcd etcd-server 3.5.3
etcdutl etcd-server 3.5.3
etcdctl etcd-client 3.5.3
nft nftables 1.0.7
ip iproute2 0
ss iproute2 0
"

say() { echo "moorage runtime: $*" >&2; }
die() {
  say "$*"
  exit 206
}

prefix=${MOORAGE_RUNTIME:-/opt/moorage/runtime}
sources=
force=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) prefix=${2:?--prefix needs a folder} && shift 2 ;;
    --sources) sources=${2:?--sources needs a file} && shift 2 ;;
    --force) force=yes && shift ;;
    *) die "unknown argument $1 (known: --prefix DIR, --sources FILE, --force)" ;;
  esac
done
case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
prefix=${prefix%/}

version_of() { # program path
  case $1 in
    criu) "$2" --version ;;
    runc) "$2" --version ;;
    etcd) "$2" --version ;;
    etcdutl | etcdctl) "$2" version ;;
    nft) "$2" --version ;;
    ip | ss) "$2" -V ;;
  esac 2>&1 </dev/null | sed -nE 's/^(Version: |runc version |etcd Version: |etcdutl version: |etcdctl version: |nftables v|.*iproute2-)([0-9][0-9.]*[0-9]).*/\2/p' |
    head -n 1
}

new_enough() { # program version least
  [ -n "$2" ] || return 1
  case $1 in etcd*) if dpkg --compare-versions "$2" ge 3.4 && dpkg --compare-versions "$2" lt 3.5; then return 0; fi ;; esac
  if [ "$1" = runc ] && dpkg --compare-versions "$2" ge 1.3 && dpkg --compare-versions "$2" lt 1.3.3; then return 1; fi
  dpkg --compare-versions "$2" ge "$3"
}

# --- Is everything there already?

complete() {
  [ -e "$prefix/.stamp" ] && grep -qx "recipe $recipe" "$prefix/.stamp" || return 1
  local program least
  while read -r program _ least; do
    [ -n "$program" ] || continue
    [ -x "$prefix/bin/$program" ] || return 1
    # A program of the machine that is linked to may have been replaced since.
    case $(readlink -f "$prefix/bin/$program") in
      "$(readlink -f "$prefix")"/*) ;;
      *) new_enough "$program" "$(version_of "$program" "$prefix/bin/$program")" "$least" || return 1 ;;
    esac
  done <<<"$table"
}

if [ -z "$force" ] && complete; then
  say "$prefix is complete ($(grep -v '^recipe' "$prefix/.stamp" | tr '\n' ',' | sed 's/,$//; s/,/, /g'))"
  exit 0
fi

type apt-get dpkg-deb flock >/dev/null 2>&1 ||
  die "this is not a Debian or Ubuntu machine: install CRIU 4.2, runc 1.3.3 and etcd 3.5.3 or newer, nftables and iproute2 by hand"
mkdir -p "$(dirname "$prefix")" 2>/dev/null || true
{ [ -d "$(dirname "$prefix")" ] && [ -w "$(dirname "$prefix")" ]; } ||
  die "$(dirname "$prefix") cannot be written: run this as root, or name another folder with --prefix"

exec 9>"$prefix.lock"
flock 9
if [ -z "$force" ] && complete; then exit 0; fi # another installer was quicker

work=$(mktemp -d)
new=
trap 'say "failed in line $LINENO"' ERR
trap 'rm -rf "$work"; [ -z "$new" ] || rm -rf "$new"' EXIT

# --- Which programs does this machine have, and which must be fetched?

links=() # program=path of the machine's own
packages=()
while read -r program package least; do
  [ -n "$program" ] || continue
  path=$(PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$program" || true)
  # What stands in the folder that is to be replaced is no program of the machine.
  case $path in "$prefix"/* | "$prefix"-*) path= ;; esac
  if [ -n "$path" ] && new_enough "$program" "$(version_of "$program" "$path")" "$least"; then
    links+=("$program=$path")
  else
    packages+=("$package")
  fi
done <<<"$table"
mapfile -t packages < <(printf '%s\n' "${packages[@]}" | sort -u | grep .)

# --- Fetch: a second apt configuration, so that the machine's own package state stays as it is.

# shellcheck source=/dev/null
. /etc/os-release
codename=${VERSION_CODENAME:-}
case ${ID:-} in ubuntu) newest=devel ;; *) newest=sid ;; esac
architecture=$(dpkg --print-architecture)

# What the archive's base suite may be called in the machine's own list (security and updates suites are left out).
base="($codename|stable|testing|unstable|sid|devel)"
for file in /etc/apt/sources.list.d/*.sources; do
  [ ! -e "$file" ] || awk -v base="$base" 'BEGIN { RS = ""; ORS = "\n\n" }
    /(^|\n)Types:[^\n]*deb/ && !/(^|\n)Enabled: *no/ && $0 ~ "(^|\n)Suites:([^\n]*[ \t])?" base "([ \t\n]|$)"' "$file"
done | sed -E "s/^Suites:(.*[[:space:]])?$base([[:space:]].*)?\$/Suites: \2/; s/^Types:.*/Types: deb/" >"$work/own.sources"
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
  [ ! -e "$file" ] || sed -nE "s/^(deb[[:space:]]+(\[[^]]*\][[:space:]]+)?[^[:space:]]+[[:space:]]+${base}[[:space:]].*)$/\1/p" "$file"
done >"$work/own.list"

apt_options=(
  -oDir::State::Lists="$work/lists" -oDir::Etc::SourceList=/dev/null -oDir::Etc::SourceParts="$work/sources"
  -oDir::Etc::Preferences=/dev/null -oDir::Etc::PreferencesParts=/dev/null
  -oDir::Cache::pkgcache= -oDir::Cache::srcpkgcache= -oDir::State::status=/dev/null
  -oAPT::Architecture="$architecture" -oAPT::Architectures="$architecture" -oAPT::Sandbox::User=root
)

use_suite() { # suite, or nothing for the machine's own: read its package lists
  rm -rf "$work/sources" "$work/lists"
  mkdir -p "$work/sources" "$work/lists/partial"
  if [ -n "$sources" ]; then
    cp "$sources" "$work/sources/given.sources"
  else
    [ -s "$work/own.sources" ] || [ -s "$work/own.list" ] ||
      die "apt's sources name no archive for $codename: add one, or give a source file with --sources"
    if [ -z "$1" ]; then
      cp "$work/own.sources" "$work/own.list" "$work/sources/"
    else
      sed -E "s/^Suites:.*/Suites: $1/" "$work/own.sources" >"$work/sources/own.sources"
      sed -E "s/^(deb[[:space:]]+(\[[^]]*\][[:space:]]+)?[^[:space:]]+[[:space:]]+)[^[:space:]]+/\1$1/" \
        "$work/own.list" >"$work/sources/own.list"
    fi
  fi
  # Other vendors' archives may stand in the list too and lack this suite: what counts is that Debian's own was read.
  # (Nor does apt's exit code tell: it is 0 when an archive cannot be reached.)
  apt-get "${apt_options[@]}" -qq update >"$work/log" 2>&1 || true
  apt-cache "${apt_options[@]}" show runc >/dev/null 2>&1 ||
    die "the package lists cannot be read: $(grep -m1 -E '^(E|W|Err):' "$work/log" || tail -n1 "$work/log")"
}

missing() { # package: whether it is to be fetched
  case " ${packages[*]} " in *" $1 "*) ;; *) return 1 ;; esac
}

offers_enough() { # every package that is missing is new enough in the suite in use
  local program package least candidate
  while read -r program package least; do
    missing "$package" || continue
    candidate=$(apt-cache "${apt_options[@]}" policy "$package" | sed -nE 's/^ *Candidate: ([0-9]+:)?(.*)/\2/p')
    # A Debian revision sorts above the bare upstream version, so `ge` is right.
    dpkg --compare-versions "${candidate:-0}" ge "$least" || return 1
    new_enough "$package" "$candidate" "$least" || return 1
  done <<<"$table"
}

fetch() {
  say "fetching ${packages[*]} ($1)"
  # The closure without service managers, account tools and the like, which only maintainer scripts need.
  local list names deb
  list=$(apt-get "${apt_options[@]}" -s --no-install-recommends -y install "${packages[@]}" patchelf 2>"$work/log" |
    sed -nE 's/^Inst ([^ ]+) .*/\1/p') || die "the packages cannot be resolved: $(grep -m1 '^E:' "$work/log")"
  list=$(grep -E "^($(IFS='|' && echo "${packages[*]}")|patchelf|zlib1g|lib.*)$" <<<"$list" | grep -vE '^lib(pam|perl|systemd-shared)')
  mapfile -t names <<<"$list"
  mkdir -p "$work/debs" "$work/tree"
  (cd "$work/debs" && apt-get "${apt_options[@]}" -qq download "${names[@]}" >"$work/log" 2>&1) ||
    die "the packages cannot be fetched: $(grep -m1 '^E:' "$work/log" || tail -n1 "$work/log")"
  for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$work/tree"; done
}

file_of() { # name: the regular file or link of that name in the unpacked tree
  find "$work/tree" \( -path '*/bin/*' -o -path '*/sbin/*' \) -name "$1" ! -type d -print | sort -r | head -n 1
}

linked() { # program: whether the machine's own is used
  case " ${links[*]} " in *" $1="*) ;; *) return 1 ;; esac
}

holds_all() { # whether each program that is missing was among what was fetched; else the first one's name in $absent
  while read -r absent _; do
    [ -n "$absent" ] || continue
    linked "$absent" || [ -n "$(file_of "$absent")" ] || return 1
  done <<<"$table"
}

# --- Build the new folder.

new=$prefix-$(date +%Y%m%d%H%M%S)-$$
mkdir -p "$new/bin" "$new/lib"

if [ ${#packages[@]} -gt 0 ]; then
  origin=${sources:-$codename}
  use_suite ""
  if [ -z "$sources" ] && ! offers_enough; then
    origin=$newest
    use_suite "$newest"
  fi
  offers_enough || die "neither this release nor the newest one of its archive has ${packages[*]} in versions that are new enough"
  fetch "$origin"
  if ! holds_all && [ -z "$sources" ] && [ "$origin" != "$newest" ]; then # a release may package etcd without its tools
    rm -rf "$work/debs" "$work/tree"
    use_suite "$newest"
    offers_enough || die "the newest release of this machine's archive has ${packages[*]} in versions that are too old"
    fetch "$newest"
  fi
  holds_all || die "the fetched packages hold no $absent"

  library_folder=$(dirname "$(find "$work/tree" -name 'libc.so.6' | head -n 1)")
  loader=$(find "$library_folder" -name 'ld-linux*.so.*' | head -n 1)
  patch() { "$loader" --library-path "$library_folder" "$(file_of patchelf)" "$@"; }

  take_libraries() { # file: copy what it needs, and what that needs
    local name found
    for name in $(patch --print-needed "$1"); do
      [ ! -e "$new/lib/$name" ] || continue
      found=$(find "$work/tree" -name "$name" ! -type d | head -n 1)
      [ -n "$found" ] || die "$(basename "$1") needs $name, which no fetched package has"
      cp -L --preserve=mode,timestamps "$found" "$new/lib/$name"
      take_libraries "$new/lib/$name"
    done
  }

  while read -r program package _; do
    missing "$package" || continue
    ! linked "$program" || continue
    cp -L --preserve=mode,timestamps "$(file_of "$program")" "$new/bin/$program"
    interpreter=$(patch --print-interpreter "$new/bin/$program" 2>/dev/null) || continue # static: runs as it is
    take_libraries "$new/bin/$program"
    # Opened by the C library when a thread is cancelled, so no file names it as needed.
    cp -L --preserve=mode,timestamps "$library_folder/libgcc_s.so.1" "$new/lib/"
    cp -L --preserve=mode,timestamps "$loader" "$new/lib/$(basename "$interpreter")"
    patch --set-interpreter "$new/lib/$(basename "$interpreter")" --force-rpath --set-rpath "$new/lib" "$new/bin/$program"
  done <<<"$table"
fi
for link in "${links[@]}"; do ln -s "${link#*=}" "$new/bin/${link%%=*}"; done

# --- Try every program before anybody sees it.

echo "recipe $recipe" >"$new/.stamp"
while read -r program _ least; do
  [ -n "$program" ] || continue
  have=$(version_of "$program" "$new/bin/$program" || true)
  new_enough "$program" "$have" "$least" || die "$program does not run, or is too old (${have:-no version}, at least $least)"
  echo "$program $have" >>"$new/.stamp"
done <<<"$table"
chmod -R go-w,a+rX "$new"

# --- Put it in place.

before=$(readlink -f "$prefix" || true)
ln -s "$(basename "$new")" "$new.link"
if [ -d "$prefix" ] && [ ! -L "$prefix" ]; then # laid by something else
  mv -T "$prefix" "$prefix-before-$$"
  before=$prefix-before-$$
fi
mv -T "$new.link" "$prefix"
keep=$new
new=
for folder in "$prefix"-2*-*/; do
  folder=${folder%/}
  case $folder in "$keep" | "$before" | "$prefix-2*") ;; *) rm -rf "$folder" ;; esac
done
say "laid $prefix ($(grep -v '^recipe' "$prefix/.stamp" | tr '\n' ',' | sed 's/,$//; s/,/, /g'), $(du -sm "$keep" | cut -f1) MiB)"
