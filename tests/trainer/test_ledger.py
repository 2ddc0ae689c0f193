import hashlib

from headrace.trainer.ledger import roll

A, B = b"a" * 16, b"b" * 16


def test_the_hash_is_blake2b_over_the_one_before_and_the_digests() -> None:
    first = roll("", [A, B])
    assert first == hashlib.blake2b(A + B, digest_size=16).hexdigest()
    second = hashlib.blake2b(bytes.fromhex(first) + B, digest_size=16).hexdigest()
    assert roll(first, [B]) == second


def test_order_and_history_count() -> None:
    assert roll("", [A, B]) != roll("", [B, A])
    assert roll(roll("", [A]), [B]) != roll("", [A, B])
