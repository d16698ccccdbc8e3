"""Numbers that the torch reference and the Triton kernels share, so that neither can drift from the other.

Polynomial coefficients are minimax fits (Remez) of the functions named beside them, lowest power first. The fits are
good to 2^-51 relative to the function or better, far below half a ULP of float32; the tests measure them against
mpmath. Splits of ln 2 and pi/2 are Cody and Waite's: the leading parts end in zeros, so that their product with an
integer k is exact.
"""

# Adding and subtracting 1.5 * 2^52 rounds |x| < 2^51 to the nearest integer, ties to even; the low bits of the sum are
# that integer in two's complement.
ROUND_MAGIC = 6755399441055744.0
ROUND_MAGIC_BITS = 0x4338000000000000

# exp: beyond these arguments the float64 result is +inf and +0.
EXP_OVERFLOW = 710.0
EXP_UNDERFLOW = -746.0
# Here e^x is a small normal number yet.
EXP_NORMAL = -708.0
EXP2_OVERFLOW = 1025.0
EXP2_UNDERFLOW = -1076.0
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
LN2 = float.fromhex("0x1.62e42fefa39efp-1")
# 42 leading bits of ln 2: times |k| <= 1076 exact.
LN2_HIGH = float.fromhex("0x1.62e42fefa38p-1")
LN2_LOW = float.fromhex("0x1.ef35793c7673p-45")
# exp(r) = 1 + r + r^2 * EXP(r), |r| <= ln 2 / 2
EXP = tuple(
    float.fromhex(text)
    for text in (
        "0x1.ffffffffffed2p-2",
        "0x1.55555555507b6p-3",
        "0x1.5555555589169p-5",
        "0x1.11111125b70bep-7",
        "0x1.6c16c0c81877bp-10",
        "0x1.a0198d4c804f5p-13",
        "0x1.a01b7c755195ap-16",
        "0x1.72e9288fb0f72p-19",
        "0x1.27079b70050bap-22",
    )
)

# log: the significand is taken from [sqrt(1/2), sqrt(2)).
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
# The same significand one exponent higher: 1 + x from here on has k = 1.
SQRT_TWO = float.fromhex("0x1.6a09e667f3bcdp+0")
SIGNIFICAND_MASK = 0x000FFFFFFFFFFFFF
SMALLEST_NORMAL = float.fromhex("0x1p-1022")
TWO_TO_54 = float.fromhex("0x1p54")
# log((1 + s) / (1 - s)) = 2 s + s z LOG(z), z = s^2, |s| <= (sqrt(2) - 1) / (sqrt(2) + 1)
LOG = tuple(
    float.fromhex(text)
    for text in (
        "0x1.555555555395cp-1",
        "0x1.999999a295d94p-2",
        "0x1.24924176129f8p-2",
        "0x1.c722790df65b7p-3",
        "0x1.732c046c34faep-3",
        "0x1.58792243ac7e5p-3",
    )
)

# sin, cos: with |x| <= 2^20 the integer k has at most 20 bits and k * PI_2_HIGH and k * PI_2_MIDDLE are exact.
TRIG_LIMIT = 1048576.0
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
PI_2_HIGH = float.fromhex("0x1.921fb544p+0")
PI_2_MIDDLE = float.fromhex("0x1.0b4611a6p-34")
PI_2_LOW = float.fromhex("0x1.3198a2e037073p-69")
# sin(r) = r (1 + z SIN(z)), z = r^2, |r| <= pi / 4
SIN = tuple(
    float.fromhex(text)
    for text in (
        "-0x1.5555555555549p-3",
        "0x1.111111110f880p-7",
        "-0x1.a01a019c1256fp-13",
        "0x1.71de3578621fep-19",
        "-0x1.ae5e66c605579p-26",
        "0x1.5d932ad123b19p-33",
    )
)
# cos(r) = 1 + z (-1/2 + z COS(z))
COS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.5555555553112p-5",
        "-0x1.6c16c1676b927p-10",
        "0x1.a019faaa49663p-16",
        "-0x1.27e02a7e703edp-22",
        "0x1.1bc7c0f5e7260p-29",
    )
)
