/* From the configuration to the scheduler: an operator sets objectives, and this file derives the
 * parameters for the scheduler, the limits for the workers, and a description. Pure. */
#ifndef BT_CONDUCTOR_SCHED_CONF_H
#define BT_CONDUCTOR_SCHED_CONF_H

#include "common/policy/sched/sched.h"
#include "conductor/conf.h"

/* Parameters of the configured policy; those that it does not use are 0. conf was checked. */
void bt_sched_conf_params(const struct bt_conductor_conf *conf, struct bt_sched_params *p);
/* Describes the settings that are in force, one sentence a line; for bt_conf_schema.describe. */
void bt_sched_conf_describe(const void *conf, char *text, size_t cap);
/* Notes about keys without the effect that an operator expects: the i-th note, from 0 on; NULL: no
 * more. Static text. */
const char *bt_sched_conf_note(const struct bt_conductor_conf *conf, uint32_t i);

#endif
