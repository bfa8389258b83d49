"""Artifacts in a real S3-speaking server, with faults on the way."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from catalog.artifacts import StoreLocation, check_location, open_store
from catalog.blobs import BlobStore
from catalog.objects.download import PIECE_BYTES
from catalog.objects.location import Patience
from catalog.objects.presence import Presence
from catalog.objects.store import RENEW_AFTER_S, ObjectStore
from catalog.objects.upload import PART_BYTES
from tests.catalog.harness import Clock, Sweeping
from tests.object_storage import (
    REGION,
    SECRET,
    FaultyProxy,
    Handler,
    ObjectServer,
    Reply,
    answer,
    corrupt,
    cut,
    delay,
    dropped,
    unheard,
)
from wire.outcomes import ArtifactUnavailable, InvalidRequest, RoostError, StorageFull

ROOT = Path(__file__).resolve().parents[2]
LARGE_BYTES = 2 * PART_BYTES + 12_345
HURRIED = Patience(request_s=2.0, total_s=1.5)
NEVER: Callable[[], bool] = lambda: False  # noqa: E731

pytestmark = pytest.mark.usefixtures("s3_keys")


class Bucket:
    """A bucket and two ways to it: straight, and through the proxy."""

    def __init__(self, server: ObjectServer, proxy: FaultyProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.clock = Clock()
        self.name = server.new_bucket()
        self.url = f"s3://{self.name}/some/prefix"
        self.straight = ObjectStore(self.url, endpoint=server.endpoint, region=REGION, now=self.clock)
        self.store = ObjectStore(self.url, endpoint=proxy.endpoint, region=REGION, patience=HURRIED, now=self.clock)

    def objects(self) -> dict[str, int]:
        return self.server.keys(self.name)

    def unfinished(self) -> list[str]:
        return self.server.unfinished(self.name)

    def key(self, digest: str) -> str:
        return f"some/prefix/{self.store.key(digest)}"


@pytest.fixture
def bucket(s3: ObjectServer, proxy: FaultyProxy) -> Bucket:
    return Bucket(s3, proxy)


def put(store: ObjectStore, content: bytes, *, announced: bool = True, step: int = 1 << 20) -> str:
    digest: str = blake3(content).hexdigest()
    with store.writer(digest if announced else None) as writer:
        for start in range(0, len(content), step):
            writer.write(content[start : start + step])
        stored = writer.commit()
    assert (stored.digest, stored.size) == (digest, len(content))
    return digest


def content_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def read(store: ObjectStore, digest: str) -> bytes:
    with store.open(digest) as source:
        buffer = bytearray(source.size)
        assert source.fill(memoryview(buffer), NEVER) == digest
        return bytes(buffer)


class TestUpload:
    @pytest.mark.parametrize("announced", [True, False])
    @pytest.mark.parametrize("size", [0, 1, PART_BYTES, PART_BYTES + 1, LARGE_BYTES])
    def test_what_is_written_is_one_object_under_its_digest(self, bucket: Bucket, size: int, announced: bool) -> None:
        content = content_of(size)
        digest = put(bucket.store, content, announced=announced)
        assert bucket.objects() == {bucket.key(digest): size}
        assert bucket.store.size(digest) == size
        bucket.store.verify(digest)
        assert read(bucket.store, digest) == content
        assert bucket.unfinished() == []

    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    def test_bytes_of_another_digest_are_refused_and_leave_nothing(self, bucket: Bucket, size: int) -> None:
        with bucket.store.writer("0" * 64) as writer, pytest.raises(ArtifactUnavailable, match="as announced") as told:
            writer.write(content_of(size))
            writer.commit()
        assert told.value.field == "digest"
        assert bucket.objects() == {}
        assert bucket.unfinished() == []

    @pytest.mark.parametrize("announced", [True, False])
    def test_an_abandoned_upload_leaves_nothing(self, bucket: Bucket, announced: bool) -> None:
        content = content_of(LARGE_BYTES)
        digest = blake3(content).hexdigest()
        with pytest.raises(KeyError), bucket.store.writer(digest if announced else None) as writer:
            writer.write(content)
            raise KeyError("the client went away")
        assert bucket.objects() == {}
        assert bucket.unfinished() == []

    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    def test_the_same_digest_again_is_the_same_object(self, bucket: Bucket, size: int) -> None:
        digest = put(bucket.store, content_of(size))
        before = bucket.server.client.head_object(Bucket=bucket.name, Key=bucket.key(digest))
        assert put(bucket.store, content_of(size)) == digest
        after = bucket.server.client.head_object(Bucket=bucket.name, Key=bucket.key(digest))
        assert (before["ETag"], before["LastModified"]) == (after["ETag"], after["LastModified"])
        assert bucket.objects() == {bucket.key(digest): size}
        assert bucket.unfinished() == []

    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    def test_what_is_old_or_not_whole_is_put_again(self, bucket: Bucket, size: int) -> None:
        content = content_of(size)
        digest = put(bucket.store, content)
        bucket.server.client.put_object(Bucket=bucket.name, Key=bucket.key(digest), Body=b"half")
        put(bucket.store, content)
        assert read(bucket.store, digest) == content
        bucket.server.client.put_object(Bucket=bucket.name, Key=bucket.key(digest), Body=bytes(size))
        bucket.clock.ahead_s = 2 * RENEW_AFTER_S
        put(bucket.store, content)
        assert read(bucket.store, digest) == content

    @pytest.mark.parametrize("announced", [True, False])
    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    def test_what_is_corrupt_is_put_again(self, bucket: Bucket, size: int, announced: bool) -> None:
        content = content_of(size)
        digest = put(bucket.store, content, announced=announced)
        bucket.server.client.put_object(Bucket=bucket.name, Key=bucket.key(digest), Body=bytes(size))
        with pytest.raises(ArtifactUnavailable, match="corrupt"):
            bucket.store.verify(digest)
        put(bucket.store, content, announced=announced)
        bucket.store.verify(digest)
        assert bucket.objects() == {bucket.key(digest): size}

    def test_many_at_once_make_one_object(self, bucket: Bucket) -> None:
        content = content_of(PART_BYTES + 1)
        with ThreadPoolExecutor(6) as threads:
            found = set(threads.map(lambda number: put(bucket.store, content, announced=number % 2 == 0), range(6)))
        (digest,) = found
        assert bucket.objects() == {bucket.key(digest): len(content)}
        assert read(bucket.store, digest) == content

    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    @pytest.mark.parametrize(
        "fault",
        [answer(500, "InternalError"), answer(503, "SlowDown"), dropped(), unheard(), delay(2.5)],
        ids=["500", "slow-down", "dropped", "unheard", "late"],
    )
    def test_a_passing_fault_is_tried_again(self, bucket: Bucket, fault: Callable[..., None], size: int) -> None:
        store = ObjectStore(
            bucket.url, endpoint=bucket.proxy.endpoint, region=REGION, patience=Patience(request_s=2.0, total_s=20.0)
        )
        bucket.proxy.inject(fault, method="PUT", times=1)
        bucket.proxy.inject(fault, method="POST", path="uploadId", times=1)
        content = content_of(size)
        digest = put(store, content)
        assert read(bucket.straight, digest) == content
        assert bucket.objects() == {bucket.key(digest): size}

    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    @pytest.mark.parametrize(
        ("status", "code", "expected", "match"),
        [
            (503, "SlowDown", ArtifactUnavailable, "503 SlowDown, too busy"),
            (500, "InternalError", ArtifactUnavailable, "500 InternalError"),
            (403, "AccessDenied", ArtifactUnavailable, "refuses our credentials"),
            (403, "QuotaExceeded", StorageFull, "no room"),
            (507, "InsufficientStorage", StorageFull, "no room"),
            (404, "NoSuchBucket", ArtifactUnavailable, "no such object or bucket"),
        ],
    )
    def test_a_lasting_fault_is_told_for_what_it_is(
        self, bucket: Bucket, status: int, code: str, expected: type[RoostError], match: str, size: int
    ) -> None:
        bucket.proxy.inject(answer(status, code))
        with pytest.raises(expected, match=match) as told:
            put(bucket.store, content_of(size))
        assert (told.value.retry_after_s is None) == (status in {403, 404} and expected is not StorageFull)
        assert bucket.objects() == {}

    def test_memory_does_not_grow_with_the_artifact(self, bucket: Bucket) -> None:
        """160 MiB go through a process that may take 110."""
        program = f"""
import resource
from catalog.objects.store import ObjectStore
store = ObjectStore({bucket.url!r}, endpoint={bucket.server.endpoint!r}, region={REGION!r})
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with store.writer() as writer:
    before = peak()
    for number in range(160):
        writer.write(bytes([number]) * (1 << 20))
    print(writer.commit().digest, peak() - before)
"""
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        digest, grown_kib = done.stdout.split()
        assert int(grown_kib) < 110 * 1024
        assert bucket.objects() == {bucket.key(digest): 160 << 20}


class TestRead:
    def test_pieces_come_in_parallel_and_land_in_order(self, bucket: Bucket) -> None:
        content = content_of(5 * PIECE_BYTES + 77)
        digest = put(bucket.straight, content)
        bucket.proxy.inject(delay(0.3), method="GET")
        started = time.monotonic()
        assert read(bucket.store, digest) == content
        assert bucket.proxy.count("GET") == 6
        assert time.monotonic() - started < 6 * 0.3

    @pytest.mark.parametrize(
        "fault",
        [answer(500, "InternalError"), answer(503, "SlowDown"), cut(), cut(100_000), delay(2.5)],
        ids=["500", "slow-down", "cut", "cut-in-body", "late"],
    )
    def test_a_passing_fault_is_tried_again(self, bucket: Bucket, fault: Callable[..., None]) -> None:
        content = content_of(LARGE_BYTES)
        digest = put(bucket.straight, content)
        store = ObjectStore(
            bucket.url, endpoint=bucket.proxy.endpoint, region=REGION, patience=Patience(request_s=2.0, total_s=20.0)
        )
        bucket.proxy.inject(fault, method="GET", times=2)
        assert read(store, digest) == content

    def test_a_wrong_bit_is_noticed(self, bucket: Bucket) -> None:
        content = content_of(LARGE_BYTES)
        digest = put(bucket.straight, content)
        bucket.proxy.inject(corrupt(), method="GET", times=3)
        with bucket.store.open(digest) as source:
            assert source.fill(memoryview(bytearray(source.size)), NEVER) not in {digest, None}
        bucket.proxy.heal()
        bucket.proxy.inject(corrupt(), method="GET")
        with pytest.raises(ArtifactUnavailable, match="corrupt"):
            bucket.store.verify(digest)
        with pytest.raises(ArtifactUnavailable, match="corrupt"), bucket.store.as_file(digest):
            raise AssertionError("a corrupt file was handed out")

    def test_as_a_file_it_is_whole_and_goes_afterwards(self, bucket: Bucket) -> None:
        content = content_of(LARGE_BYTES)
        digest = put(bucket.straight, content)
        with bucket.store.as_file(digest) as path:
            assert path.read_bytes() == content
            assert path.stat().st_mode & 0o077 == 0
        assert not path.exists()

    def test_what_is_not_there_is_said_so(self, bucket: Bucket) -> None:
        assert bucket.store.size("0" * 64) is None
        for ask in (bucket.store.verify, lambda digest: bucket.store.open(digest).__enter__()):
            with pytest.raises(ArtifactUnavailable, match="no such object"):
                ask("0" * 64)

    @pytest.mark.parametrize("digest", ["", "..", "../../etc/passwd", "0" * 63, "A" * 64, "0" * 63 + "\n"])
    def test_only_a_digest_names_an_object(self, bucket: Bucket, digest: str) -> None:
        for ask in (bucket.store.size, bucket.store.verify, bucket.store.writer):
            with pytest.raises(InvalidRequest):
                ask(digest)
        assert bucket.proxy.seen == []

    def test_a_read_that_is_given_up_ends_at_once(self, bucket: Bucket) -> None:
        digest = put(bucket.straight, content_of(LARGE_BYTES))
        bucket.proxy.inject(delay(1.9), method="GET")
        given_up = threading.Event()
        threading.Timer(0.2, given_up.set).start()
        with bucket.store.open(digest) as source:
            buffer = bytearray(source.size)
            started = time.monotonic()
            assert source.fill(memoryview(buffer), given_up.is_set) is None
        assert time.monotonic() - started < 1.5
        time.sleep(2.0)
        assert buffer == bytes(len(buffer)), "something was written after the end"

    def test_a_question_has_an_answer_within_seconds(self, bucket: Bucket) -> None:
        bucket.proxy.inject(delay(20.0), method="HEAD")
        started = time.monotonic()
        with pytest.raises(ArtifactUnavailable, match="did not answer in time") as told:
            bucket.store.size("0" * 64)
        assert time.monotonic() - started < 5.0
        assert told.value.retry_after_s is not None


class TestKilled:
    """kill -9 of the uploader: nothing can be named, and what can be listed the sweep removes."""

    PROGRAM = """
import sys
from catalog.objects.store import ObjectStore
url, endpoint, announced, size = sys.argv[1:]
content = bytes(int(size))
with ObjectStore(url, endpoint=endpoint, region="us-east-1").writer(announced or None) as writer:
    for start in range(0, len(content), 1 << 20):
        writer.write(content[start : start + (1 << 20)])
    writer.commit()
"""

    def kill(self, bucket: Bucket, announced: str, when: Callable[[], bool]) -> None:
        arguments = [bucket.url, bucket.proxy.endpoint, announced, str(LARGE_BYTES)]
        process = subprocess.Popen([sys.executable, "-c", self.PROGRAM, *arguments], cwd=ROOT)
        deadline = time.monotonic() + 60.0
        while not when():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        process.wait()

    @pytest.mark.parametrize("moment", ["a part", "the completion"])
    def test_before_it_is_complete_there_is_no_object(self, bucket: Bucket, moment: str) -> None:
        digest = blake3(bytes(LARGE_BYTES)).hexdigest()
        pattern = "partNumber=2" if moment == "a part" else "uploadId"
        method = "PUT" if moment == "a part" else "POST"
        bucket.proxy.inject(delay(3.0), method=method, path=pattern)
        if moment == "the completion":
            # the server must not complete what nobody waits for any more: that would be no kill before it
            bucket.proxy.heal()
            bucket.proxy.inject(lambda handler, _: time.sleep(3.0), method=method, path=pattern)
        self.kill(bucket, digest, lambda: bucket.proxy.count(method, pattern) > 0)
        time.sleep(3.5)
        assert bucket.straight.size(digest) is None
        assert bucket.objects() == {}

    def test_between_its_bytes_and_its_name_it_has_none(self, bucket: Bucket) -> None:
        digest = blake3(bytes(LARGE_BYTES)).hexdigest()
        bucket.proxy.inject(lambda handler, _: time.sleep(3.0), copy=True)
        self.kill(bucket, "", lambda: any("x-amz-copy-source" in seen.headers for seen in list(bucket.proxy.seen)))
        assert bucket.straight.size(digest) is None
        assert [key.startswith("some/prefix/partial/") for key in bucket.objects()] == [True]
        bucket.proxy.heal()
        sweep = functools.partial(Presence(bucket.store).sweep_by_folder, Sweeping(everything_is_named=True), 3600.0)
        assert sum(step.removed for step in sweep()) == 0
        bucket.clock.ahead_s = 7200.0
        assert sum(step.removed for step in sweep()) == 1
        assert bucket.objects() == {}


class TestProbe:
    def test_a_store_that_does_what_is_needed_is_left_as_it_was(self, bucket: Bucket) -> None:
        bucket.store.probe()
        assert bucket.objects() == {}

    def test_one_that_ignores_conditions_is_told(self, bucket: Bucket) -> None:
        def forgetful(handler: Handler, ask: Callable[[], Reply]) -> None:
            del handler.headers["if-none-match"]
            handler.give(ask())

        bucket.proxy.inject(forgetful, method="PUT")
        with pytest.raises(ArtifactUnavailable, match="ignores conditions"):
            bucket.store.probe()
        assert bucket.objects() == {}

    @pytest.mark.parametrize(("method", "doing"), [("GET", "list"), ("PUT", "write to"), ("POST", "delete from")])
    def test_what_it_refuses_is_named(self, bucket: Bucket, method: str, doing: str) -> None:
        bucket.proxy.inject(answer(403, "AccessDenied"), method=method)
        with pytest.raises(ArtifactUnavailable, match=f"can't {doing} the object store.*credentials"):
            bucket.store.probe()


class TestSecrets:
    def test_without_credentials_that_is_said(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        # where the client asks next, nobody answers
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9/169.254.169.254")
        store = ObjectStore(bucket.url, endpoint=bucket.server.endpoint, region=REGION)
        with pytest.raises(ArtifactUnavailable, match="AWS_ACCESS_KEY_ID"):
            store.size("0" * 64)

    def test_no_error_tells_a_secret(self, bucket: Bucket) -> None:
        for fault in (answer(403, "AccessDenied"), answer(500, "InternalError"), dropped()):
            bucket.proxy.heal()
            bucket.proxy.inject(fault)
            with pytest.raises(RoostError) as told:
                bucket.store.size("0" * 64)
            assert SECRET not in str(told.value)
            assert told.value.__cause__ is None
            assert told.value.__suppress_context__

    @pytest.mark.parametrize(
        "url", [f"s3://key:{SECRET}@bucket/prefix", f"s3://bucket/prefix?secret={SECRET}", f"az://a/b#{SECRET}"]
    )
    def test_an_url_with_a_secret_is_refused_and_not_repeated(self, url: str) -> None:
        with pytest.raises(InvalidRequest, match="environment") as told:
            check_location(StoreLocation(url))
        assert SECRET not in told.value.message


class TestLocation:
    def test_a_folder_is_the_default(self, tmp_path: Path) -> None:
        assert isinstance(open_store(tmp_path / "own"), BlobStore)
        other = open_store(tmp_path / "own", StoreLocation((tmp_path / "an other").as_uri()))
        assert isinstance(other, BlobStore)
        assert other.root == tmp_path / "an other"

    @pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a/b", "gs://bucket/a", "az://container/a"])
    def test_an_url_of_an_object_store_is_taken(self, url: str) -> None:
        assert check_location(StoreLocation(url)).remote

    @pytest.mark.parametrize(
        "location",
        [
            StoreLocation("ftp://host/a"),
            StoreLocation("s3:///a"),
            StoreLocation("https://host/a"),
            StoreLocation("s3://bucket/../other"),
            StoreLocation("file://host/a"),
            StoreLocation("bucket/prefix"),
            StoreLocation("s3://[bucket/prefix"),
            StoreLocation("s3://bucket", endpoint="127.0.0.1:9000"),
            StoreLocation(region="eu-central-1"),
        ],
    )
    def test_anything_else_is_refused(self, location: StoreLocation) -> None:
        with pytest.raises(InvalidRequest, match="store"):
            check_location(location)
