/* Numbers wider than bwd_real, for the factors that a step prepares once: a factor that was rounded too early is off
 * for every element, always in one direction.
 *
 * Beside floats that is a double. Beside doubles it is a sum of two of them, since long double is not the same on every
 * machine: Dekker, "A floating-point technique for extending the available precision", 1971, with fma for the products'
 * errors. An operand is finite; a quotient may overflow, and then bwd_wide_at_most must follow.
 */
#ifndef BWD_WIDE_H
#define BWD_WIDE_H

#include "rules/rule.h"

#ifdef BWD_REAL_IS_DOUBLE

typedef struct bwd_wide {
    double high, low; /* high is the sum, rounded */
} bwd_wide;

/* high + low where |high| >= |low|, or both are zero */
BWD_HOST bwd_wide
bwd_wide_sum(double high, double low)
{
    const bwd_wide x = {high + low, low - (high + low - high)};
    return x;
}

BWD_HOST bwd_wide
bwd_wide_of(double x)
{
    const bwd_wide wide = {x, 0.0};
    return wide;
}

/* 1 - x for x >= 0 */
BWD_HOST bwd_wide
bwd_wide_one_minus(bwd_wide x)
{
    const bwd_wide difference = x.high <= 1.0 ? bwd_wide_sum(1.0, -x.high) : bwd_wide_sum(-x.high, 1.0);
    return bwd_wide_sum(difference.high, difference.low - x.low);
}

BWD_HOST bwd_wide
bwd_wide_product(double x, double y)
{
    return bwd_wide_sum(x * y, fma(x, y, -(x * y)));
}

BWD_HOST bwd_wide
bwd_wide_quotient(bwd_wide x, bwd_wide y)
{
    const double quotient = x.high / y.high;
    return bwd_wide_sum(quotient, (fma(-quotient, y.high, x.high) + (x.low - quotient * y.low)) / y.high);
}

BWD_HOST bwd_wide
bwd_wide_root(double x)
{
    const double root = sqrt(x);
    return bwd_wide_sum(root, fma(-root, root, x) / (2.0 * root));
}

BWD_HOST bwd_wide
bwd_wide_at_most(bwd_wide x, double most)
{
    return x.high < most ? x : bwd_wide_of(most);
}

BWD_HOST bwd_real
bwd_wide_rounded(bwd_wide x)
{
    return x.high;
}

BWD_HOST double
bwd_wide_rest(bwd_wide x, bwd_real part)
{
    return x.high - part + x.low;
}

#else

typedef double bwd_wide;

BWD_HOST bwd_wide
bwd_wide_of(double x)
{
    return x;
}

BWD_HOST bwd_wide
bwd_wide_one_minus(bwd_wide x)
{
    return 1.0 - x;
}

BWD_HOST bwd_wide
bwd_wide_product(double x, double y)
{
    return x * y;
}

BWD_HOST bwd_wide
bwd_wide_quotient(bwd_wide x, bwd_wide y)
{
    return x / y;
}

BWD_HOST bwd_wide
bwd_wide_root(double x)
{
    return sqrt(x);
}

BWD_HOST bwd_wide
bwd_wide_at_most(bwd_wide x, double most)
{
    return fmin(x, most);
}

BWD_HOST bwd_real
bwd_wide_rounded(bwd_wide x)
{
    return (bwd_real)x;
}

BWD_HOST double
bwd_wide_rest(bwd_wide x, bwd_real part)
{
    return x - (double)part;
}

#endif

/* As a factor. Both parts have the sign of x, so that an infinite operand stays infinite: a low part of zero or of the
 * other sign would make it NaN. Where x fits high alone, low is too small to change any result but that one. */
BWD_HOST bwd_split
bwd_split_of(bwd_wide x)
{
    bwd_split s = {bwd_wide_rounded(x), 0};
    double rest = bwd_wide_rest(x, s.high);
    if (rest != 0.0 && (rest < 0.0) != (s.high < 0)) {
        s.high = BWD_REAL_FN(nextafter)(s.high, 0);
        rest = bwd_wide_rest(x, s.high);
    }
    const int fits = !(rest < 0.0 || rest > 0.0); /* NaN is left of an infinite x */
    s.low = fits ? s.high * (bwd_real)0x1p-60 : (bwd_real)rest;
    return s;
}

#endif
