"""Counters see what is reported while they are open, on their own thread, and nothing else."""

import threading

from te_overrides.kernels import accounting


def test_nothing_is_counted_outside_a_block():
    accounting.flops(5)
    with accounting.count() as counter:
        pass
    accounting.flops(7)
    assert counter == accounting.Counter()


def test_nested_counters_each_see_their_own_block():
    with accounting.count() as outer:
        accounting.flops(1)
        with accounting.count() as inner:
            accounting.flops(2)
            accounting.bytes_sent(3, "all_gather")
        accounting.bytes_sent(4, "all_to_all")
        accounting.bytes_sent(5, "all_gather")
    assert (outer.flops, outer.bytes_sent) == (3, {"all_gather": 8, "all_to_all": 4})
    assert outer.total_bytes_sent == 12
    assert (inner.flops, inner.bytes_sent) == (2, {"all_gather": 3})


def test_equal_counters_close_in_any_order():
    with accounting.count() as outer, accounting.count() as inner:
        pass
    assert outer == inner
    assert accounting._open.stack == []


def test_another_thread_is_not_seen():
    with accounting.count() as counter:
        worker = threading.Thread(target=accounting.flops, args=(9,))
        worker.start()
        worker.join()
    assert counter.flops == 0
