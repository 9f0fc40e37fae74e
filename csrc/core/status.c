/* The sentences that go with the codes. */
#include "core/status.h"

static const char *const status_texts[BWD_STATUS_COUNT] = {
    [BWD_OK] = "done",
    [BWD_BAD_RULE] = "no such rule",
    [BWD_BAD_FORMAT] = "no kernel for this combination of param, grad and state dtypes",
    [BWD_BAD_HYPER] = "a hyper-parameter is not finite or out of its range",
    [BWD_BAD_STEP] = "step must be a finite number of at least 1",
    [BWD_BAD_LAYOUT] = "shape and strides do not describe the arrays",
};

const char *
bwd_status_text(bwd_status status)
{
    return (unsigned)status < BWD_STATUS_COUNT ? status_texts[status] : "unknown status";
}
