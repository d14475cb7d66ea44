"""The cycle predictor finds the inner loop in assembly and counts its multiply-adds."""

from bench.lab.cycles import hot_loop, products

ASSEMBLY = """
kernel:
.LBB0_1:
        ldr     q1, [x0]   // outer
.LBB0_2:
        sdot    v0.4s, v1.16b, v2.4b[0]
        b.lt    .LBB0_2
        str     q0, [x1]
        b.lo    .LBB0_1
        ret
"""


def test_nested_loop_is_unrolled():
    body = hot_loop(ASSEMBLY, 3)
    assert [line.split()[0] for line in body] == ["ldr", *["sdot", "b.lt"] * 3, "str", "b.lo"]
    assert sum(map(products, body)) == 48


def test_products_of_an_instruction():
    assert products("vpdpbusd\t(%rax), %zmm1, %zmm2") == 64
    assert products("vpmaddubsw\t%ymm0, %ymm1, %ymm2") == 32
    assert products("smmla\tv0.4s, v1.16b, v2.16b") == 32
    assert products("add\tx0, x0, #1") == 0
