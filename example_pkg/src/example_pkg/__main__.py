"""`python -m example_pkg`: what is in this package, which image a device would take, and a check on the GPU here."""

from __future__ import annotations

import sys
import textwrap

from ._cuda_aot import CudaUnavailableError, explain, kernel_info, kernel_names

WIDTH = 100
DRIVER = "13.0"
DEVICES = {
    "T4": "7.5",
    "A100": "8.0",
    "RTX 3090": "8.6",
    "Jetson Orin": "8.7",
    "L4, RTX 4090": "8.9",
    "H100, H200": "9.0",
    "B200": "10.0",
    "Jetson Thor": "11.0",
    "RTX 5090": "12.0",
}


def main() -> int:
    """Print the tables; run every kernel where there is a GPU. Return 1 if one is wrong, else 0."""
    print_kernels()
    print_choices()
    try:
        device = explain().device
    except CudaUnavailableError as reason:
        print("\n" + textwrap.shorten(f"No kernel was run: {reason}", WIDTH, placeholder=" ..."))
        return 0
    print(f"\nChecked against NumPy on {device}")
    return run_checks()


def print_kernels() -> None:
    """Print what was compiled: the kernels with their parameters, and each module's images."""
    infos = [kernel_info(name) for name in kernel_names()]
    width = max(len(info.name) for info in infos)
    archs: dict[str, dict[str, None]] = {}  # of each module's images, in order
    print("Kernels, with their module and parameters")
    for info in infos:
        print(f"  {info.name:{width}}  {info.module:10}  {' '.join(param.kind for param in info.params)}")
        archs.setdefault(info.module, {}).update(dict.fromkeys(info.resources))
    print("\nImages of each module: sm is machine code, compute is PTX")
    for module, images in sorted(archs.items()):
        print(f"  {module:10} {' '.join(images)}")


def print_choices() -> None:
    """Print which images devices would take that need not be there."""
    modules = sorted({row.module for row in explain(cc=DEVICES["T4"]).rows})
    print(f"\nWhat a device would take, with a driver of CUDA {DRIVER}")
    print(f"  {'':18}", "  ".join(f"{module:11}" for module in modules).rstrip())
    for name, cc in DEVICES.items():
        chosen = {row.module: row.arch for row in explain(cc=cc, driver=DRIVER).chosen}
        print(f"  {name:12} {cc:>5}", "  ".join(f"{chosen.get(module, 'none'):11}" for module in modules).rstrip())


def run_checks() -> int:
    """Run the kernels on the current device; return 1 if one is wrong, else 0."""
    from ._selfcheck import checks  # it needs CUDA, and the tables do not

    failed = 0
    for name, error, allowed in checks():
        good = error <= allowed
        failed += not good
        print(f"  {'ok  ' if good else 'FAIL'}  {name:26}  error {error:.1e}, allowed {allowed:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
