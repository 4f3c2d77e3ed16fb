#!/usr/bin/env bash
# Installs the packages that hicache needs: `build` for building and running it, `test` for the tests and checks too.
# Only what is missing is installed: with everything there, nothing is run and no network is needed.
# For Debian 12 and Ubuntu 24.04; needs root, or sudo. HICACHE_SKIP_INSTALL=1 makes it do nothing, for a machine whose
# packages were installed by other means.
set -euo pipefail

build_packages=(
  cmake ninja-build g++
  libboost-dev libssl-dev libxxhash-dev libcli11-dev nlohmann-json3-dev libspdlog-dev libfmt-dev liburing-dev
  catch2  # the default build includes the tests
)
test_packages=(clang clang-format clang-tidy python3 spin redis-server)
# Speeds builds up, but nothing fails without it.
optional_packages=(ccache)

usage() {
  echo "usage: $0 build|test"
  echo "  build  what building and running needs"
  echo "  test   that, and what tests/run.sh and .ci/run need"
}

die() {
  echo "install-dependencies: $*" >&2
  exit 1
}

is_installed() {
  [[ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

# Fills the array `missing` with those of the given packages that are not installed.
find_missing() {
  missing=()
  local package
  for package in "$@"; do
    is_installed "$package" || missing+=("$package")
  done
}

# Sanitizer run-times come in a package named after clang's major version, which differs between distributions.
clang_runtime_package() {
  local version
  version="$(dpkg-query -W -f '${Version}' clang)"  # such as 1:14.0-55.7
  version="${version#*:}"
  echo "libclang-rt-${version%%.*}-dev"
}

require_known_distribution() {
  local id="" version=""
  if [[ -r /etc/os-release ]]; then
    # shellcheck disable=SC1091
    id="$(. /etc/os-release && echo "${ID:-}")"
    # shellcheck disable=SC1091
    version="$(. /etc/os-release && echo "${VERSION_ID:-}")"
  fi
  case "$id $version" in
    "debian 12" | "ubuntu 24.04") ;;
    *)
      die "this is '${id:-unknown} ${version:-unknown}', expected Debian 12 or Ubuntu 24.04." \
        "Install the equivalents of these packages by hand, then build with CMake: $*"
      ;;
  esac
}

as_root() {
  if [[ "$(id -u)" -eq 0 ]]; then
    "$@"
  else
    sudo "$@"
  fi
}

require_root_or_sudo() {
  [[ "$(id -u)" -eq 0 ]] && return
  command -v sudo >/dev/null ||
    die "missing packages: $*. Installing them needs root: run this script as root, or install sudo."
}

apt_lists_updated=no
apt_install() {
  if [[ "$apt_lists_updated" == no ]]; then
    as_root apt-get update -q || die "apt-get update failed: check the network and /etc/apt"
    apt_lists_updated=yes
  fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
}

# Installs what is missing of the given packages, or ends with the reason why it can't.
ensure() {
  find_missing "$@"
  [[ ${#missing[@]} -eq 0 ]] && return
  require_known_distribution "${missing[@]}"
  require_root_or_sudo "${missing[@]}"
  echo "installing: ${missing[*]}"
  apt_install "${missing[@]}" || die "could not install: ${missing[*]}"
}

# Optional packages ride along when something is installed anyway; alone they are not worth a download.
ensure_optional() {
  [[ "$apt_lists_updated" == no ]] && return
  find_missing "$@"
  [[ ${#missing[@]} -eq 0 ]] && return
  apt_install "${missing[@]}" || echo "not installed (optional): ${missing[*]}" >&2
}

main() {
  if [[ "${HICACHE_SKIP_INSTALL:-0}" == 1 ]]; then
    return
  fi
  case "${1:-}" in
    build) ensure "${build_packages[@]}" ;;
    test)
      ensure "${build_packages[@]}" "${test_packages[@]}"
      ensure "$(clang_runtime_package)"
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      exit 2
      ;;
  esac
  ensure_optional "${optional_packages[@]}"
}

main "$@"
