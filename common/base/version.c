/* The only object file with release and commit: only this one is compiled again for a new commit.
 */
#include "common/base/base.h"

const char *bt_release(void)
{
    return BT_RELEASE;
}

const char *bt_version(void)
{
    return BT_VERSION;
}
