/* What the scheduler gets of the configuration: an operator says objectives, and what follows from
 * them is worked out here, for the scheduler, for the workers, and in words. Pure. */
#ifndef BT_CONDUCTOR_SCHED_CONF_H
#define BT_CONDUCTOR_SCHED_CONF_H

#include "common/policy/sched/sched.h"
#include "conductor/conf.h"

/* Parameters of the configured policy; what it does not use is 0. conf was checked. */
void bt_sched_conf_params(const struct bt_conductor_conf *conf, struct bt_sched_params *p);
/* What is in force, a sentence a line; of bt_conf_schema.describe. */
void bt_sched_conf_describe(const void *conf, char *text, size_t cap);
/* Keys that do not do what they seem to: the i-th note, from 0 on; NULL: no more. Static text. */
const char *bt_sched_conf_note(const struct bt_conductor_conf *conf, uint32_t i);

#endif
