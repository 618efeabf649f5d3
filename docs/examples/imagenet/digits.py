"""Write scikit-learn's handwritten digits as a folder of images with train/ and val/.

1797 real scans of 8x8 pixels with 17 grey levels, which scikit-learn's wheel contains (no
download): E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI 1998.
"""

import argparse
import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

INK = 16  # the scans' darkest level; 0 is paper


def write_digits(root: Path, *, size: int = 32, val_fraction: float = 1 / 3) -> None:
    """Write ``root``/{train,val}/{0..9}/NNNN.png, RGB of ``size`` x ``size``, white on black.

    The split is the same at every call and has each digit's share in both parts. ``root`` appears
    when it is complete.

    Raises:
        FileExistsError: ``root`` exists.
    """
    if root.exists():
        raise FileExistsError(f"{root} exists; remove it, or choose another folder.")
    digits = load_digits()
    numbers = np.arange(len(digits.target))
    train, val = train_test_split(
        numbers, test_size=val_fraction, stratify=digits.target, random_state=0
    )
    partial = root.with_name(f".{root.name}.{os.getpid()}.tmp")
    try:
        for part, members in (("train", train), ("val", val)):
            for digit in range(10):
                (partial / part / str(digit)).mkdir(parents=True)
            for number in members:
                image = Image.fromarray((digits.images[number] * (255 / INK)).astype(np.uint8))
                image = image.resize((size, size), Image.Resampling.BICUBIC).convert("RGB")
                image.save(partial / part / str(digits.target[number]) / f"{number:04}.png")
        partial.rename(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write handwritten digits as an image folder.")
    parser.add_argument("root", type=Path, help="folder to create")
    parser.add_argument("--size", type=int, default=32, metavar="PIXELS")
    args = parser.parse_args()
    try:
        write_digits(args.root, size=args.size)
    except FileExistsError as error:
        parser.error(str(error))
    print(f"wrote {len(list(args.root.rglob('*.png')))} images to {args.root}")


if __name__ == "__main__":
    main()
