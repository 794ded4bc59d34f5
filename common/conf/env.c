/* The environment. A file of its own: engine plugins use it, and must not contain the tables of the
 * configuration, which the program that loads them has as well. */
#include <stdlib.h>

#include "common/conf/conf.h"

const char *bt_conf_env(const char *name)
{
    return getenv(name);
}
