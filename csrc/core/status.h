/* What a call into the core can answer. The core never prints, raises or exits. */
#ifndef BWD_STATUS_H
#define BWD_STATUS_H

typedef enum bwd_status {
    BWD_OK = 0,
    BWD_BAD_RULE,
    BWD_BAD_FORMAT,
    BWD_BAD_HYPER,
    BWD_BAD_STEP,
    BWD_BAD_LAYOUT,
    BWD_STATUS_COUNT
} bwd_status;

/* One sentence for a person; never NULL. */
const char *bwd_status_text(bwd_status status);

#endif
