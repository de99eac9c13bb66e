"""Fetches published files on request, checks them against a known SHA-256, and writes them whole or not at all.

Only files whose published bytes are known are listed. The others are named in an error that says where to get them.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

from lipdp_lightning.data_modules.found_files import refusal

TIMEOUT = 30
_PIECE = 2**20


@dataclass(frozen=True)
class Source:
    """A published file and its expected content.

    Args:
        url: http or https.
        sha256: the digest of the bytes at the url.
        members: what to unpack of an archive (.tar.gz or .zip): {member: file beside the archive}.
        content: the SHA-256 of the one file that is unpacked, which checks a file that is already there.
    """

    url: str
    sha256: str
    members: tuple[tuple[str, str], ...] = ()
    content: str | None = None


_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_UCI_ZIP = "https://archive.ics.uci.edu/static/public"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_BATCHES = tuple(f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"))

# keyed by the place below the data folder where a data module looks for the file
SOURCES: dict[str, Source] = (
    {
        f"tabular/{place}": Source(f"{_UCI}/{path}", digest)
        for place, path, digest in (
            (
                "adult/adult.data",
                "adult/adult.data",
                "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            ),
            (
                "adult/adult.test",
                "adult/adult.test",
                "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            ),
            (
                "breast_cancer_wisconsin_diagnostic/wdbc.data",
                "breast-cancer-wisconsin/wdbc.data",
                "d606af411f3e5be8a317a5a8b652b425aaf0ff38ca683d5327ffff94c3695f4a",
            ),
            (
                "german_credit/german.data",
                "statlog/german/german.data",
                "b21f3d81db8071257d5ff1deaeba1fd4303b62712e6fcc9715c7a86202cb5871",
            ),
            (
                "nursery/nursery.data",
                "nursery/nursery.data",
                "8e0389c3dd37590248a921c2726d869ee96b817761a35eb8416afa24f31f931d",
            ),
            (
                "wine_quality_red/winequality-red.csv",
                "wine-quality/winequality-red.csv",
                "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
            ),
        )
    }
    | {
        "tabular/students_dropout/data.csv": Source(
            f"{_UCI_ZIP}/697/predict+students+dropout+and+academic+success.zip",
            "e90e55fd65ec462ae283ebeb2cca409319e3460ed898d8754f62fb35cc83a65d",
            (("data.csv", "data.csv"),),
            content="3ef126de5cefff26eb11fbb4237f1a1401cb64b488e2f1d598c23cedeb4c45ae",
        ),
        "tabular/diabetes_130us/diabetic_data.csv": Source(
            f"{_UCI_ZIP}/296/diabetes+130-us+hospitals+for+years+1999-2008.zip",
            "f82ac129da2ddd2299391ff6fbae3a6a58b3edcf59ac9d7bd480c00fe453112a",
            (("diabetic_data.csv", "diabetic_data.csv"),),
            content="0689e7ec031237dc63031b938805c48377748761a3b26acab621567afa24df97",
        ),
        "tabular/california_housing/cal_housing.data": Source(
            "https://ndownloader.figshare.com/files/5976036",
            "aaa5c9a6afe2225cc2aed2723682ae403280c4a3695a2ddda4ffb5d8215ea681",
            (("CaliforniaHousing/cal_housing.data", "cal_housing.data"),),
        ),
        "cifar-10-batches-py": Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            tuple((member, member) for member in _BATCHES),
        ),
    }
    | {
        f"{name}/raw/{file}-ubyte.gz": Source(f"{site}/{file}-ubyte.gz", digest)
        for name, site, files in (
            (
                "MNIST",
                _MNIST,
                {
                    "train-images-idx3": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    "train-labels-idx1": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    "t10k-images-idx3": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    "t10k-labels-idx1": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                },
            ),
            (
                "FashionMNIST",
                _FASHION,
                {
                    "train-images-idx3": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                    "train-labels-idx1": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                    "t10k-images-idx3": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                    "t10k-labels-idx1": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                },
            ),
        )
        for file, digest in files.items()
    }
)


def how_to_get(place: str) -> str:
    """Returns the hint for an error about a missing file."""
    source = SOURCES.get(place)
    return "put the file there" if source is None else f"download: true fetches it ({source.url})"


def fetched(root: Path, place: str, hint: str) -> Path:
    """Returns the file at `root/place`, downloaded if it is missing, and checked if it is there (plain, or as .gz)."""
    source, path = SOURCES.get(place), root / place
    packed = path.with_name(f"{path.name}.gz")
    there = next((candidate for candidate in (path, packed) if candidate.exists()), None)
    if there is None:
        if source is None:
            raise refusal(f"there is no file {path}, and no source with a known checksum", hint)
        download(source, path)
        return path
    expected = None if source is None else source.content if source.members else source.sha256
    if expected is not None and there.is_file():
        check(there, expected, unpack=there == packed)
    return there


def check(path: Path, sha256: str, unpack: bool = False) -> None:
    """Refuses a file whose content is not the published one."""
    digest = hashlib.sha256()
    try:
        with gzip.open(path) if unpack else path.open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except (OSError, EOFError):
        raise refusal(f"{path} cannot be read", "remove it and fetch it again") from None
    if digest.hexdigest() != sha256:
        raise refusal(
            f"{path} has the SHA-256 {digest.hexdigest()}, and {sha256} is expected",
            "the file is damaged or another version: remove it and fetch it again",
        )


def download(source: Source, path: Path) -> None:
    """Fetches into a temporary file, checks it, then renames or unpacks it; nothing unchecked is left behind."""
    if not source.url.startswith(("http://", "https://")):
        raise refusal(f"{source.url} is not an http address", "name one that starts with https://")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    except OSError as error:
        raise refusal(
            f"{path} cannot be written: {error.strerror}", "use a data folder that you may write to"
        ) from None
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            _copy(source.url, path, file)
        _check_download(part, source)
        if source.members:
            _unpack(part, source, path)
        else:
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _copy(url: str, path: Path, file: object) -> None:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            while piece := answer.read(_PIECE):
                file.write(piece)  # type: ignore[attr-defined]
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise refusal(
            f"{path} is missing and cannot be downloaded from {url}: {reason}",
            f"on a machine with internet access, fetch it from there and put it at {path}",
        ) from None


def _check_download(part: Path, source: Source) -> None:
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    if digest != source.sha256:
        raise refusal(
            f"what {source.url} sent has the SHA-256 {digest}, and {source.sha256} is expected",
            "nothing was kept; an intermediate page or a changed file: fetch it by hand and look at it",
        )


def _unpack(part: Path, source: Source, path: Path) -> None:
    """Unpacks the listed members and nothing else, each under the name given here and not under the archive's."""
    try:
        contents = _members(part, [member for member, _ in source.members])
    except (KeyError, OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise refusal(f"the archive at {source.url} cannot be unpacked: {reason}", "fetch it by hand") from None
    for (_, name), content in zip(source.members, contents, strict=True):
        target = path.parent / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.part")
        partial.write_bytes(content)
        os.replace(partial, target)


def _members(part: Path, names: list[str]) -> list[bytes]:
    """Returns the content of each named file of a zip or tar archive; a missing one raises KeyError."""
    with part.open("rb") as file:
        zipped = file.read(4) == b"PK\x03\x04"
    if zipped:
        with zipfile.ZipFile(part) as archive:
            return [archive.read(name) for name in names]
    found = []
    with tarfile.open(part) as tar:
        for name in names:
            content = tar.extractfile(name)
            if content is None:
                raise KeyError(f"{name} is not a file")
            found.append(content.read())
    return found
