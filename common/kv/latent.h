/* A token's row of MLA in FP8_E4M3 (layout.h): latent [latent] e4m3, then scales, f32, one for each
 * 128 latent values, then the key part [rope] bf16; zeros up to the row's end. FlashMLA's fp8 cache
 * has the same row (its README, "FP8 KV cache"), which takes any scale.
 *
 * Here a scale is a power of two from 2^-15 to 2^7. e4m3 is a floating-point format, so a scale
 * between powers of two would gain nothing but a part of a bit for the smallest values. In return
 * a value times its scale is a number of f16, bf16 and f32 alike: every device that reads a row in
 * one of these formats computes with the same latent. With a smaller scale than 2^-15 f16 would
 * lack numbers for the smallest values, with a larger one than 2^7 for the largest. So a latent
 * beyond 57344 becomes 57344. A NaN in a latent makes its scale NaN. Pure. */
#ifndef BT_KV_LATENT_H
#define BT_KV_LATENT_H

#include "common/kv/layout.h"

/* The row of f32 values x [latent + rope], each rounded to the nearest (ties to even). */
void bt_kv_latent_store(const struct bt_kv_group *g, const float *x, uint8_t *row);

#endif
