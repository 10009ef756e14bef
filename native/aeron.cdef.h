/* The part of Aeron's C client and C media driver that sparkstrom calls.
 *
 * Declarations only, read by cffi in ABI mode: nothing is compiled. Callback parameters that are
 * always NULL or always a native address are declared as void *, which is the same to the ABI.
 * Structs are those of Aeron 1.51 and later on 64-bit platforms; the loopback self-test
 * (sparkstrom/transport/aeron/selftest.py) compares them with the library in use. Which build that
 * is by default, and its hash, is pinned in sparkstrom/transport/aeron/pinned.py.
 */

/* common */
int aeron_version_major(void);
int aeron_version_minor(void);
const char *aeron_version_full(void);
int aeron_errcode(void);
const char *aeron_errmsg(void);
void aeron_err_clear(void);
int64_t aeron_nano_clock(void);

/* client: context and life */
typedef struct aeron_context_stct aeron_context_t;
typedef struct aeron_stct aeron_t;
int aeron_context_init(aeron_context_t **context);
int aeron_context_close(aeron_context_t *context);
int aeron_context_set_dir(aeron_context_t *context, const char *value);
int aeron_context_set_driver_timeout_ms(aeron_context_t *context, uint64_t value);
int aeron_context_set_keepalive_interval_ns(aeron_context_t *context, uint64_t value);
int aeron_context_set_resource_linger_duration_ns(aeron_context_t *context, uint64_t value);
int aeron_context_set_idle_strategy_init_args(aeron_context_t *context, const char *value);
int aeron_context_set_idle_strategy(aeron_context_t *context, const char *value);
int aeron_context_set_error_handler(aeron_context_t *context, void *handler, void *clientd);
int aeron_context_set_client_name(aeron_context_t *context, const char *value);
int aeron_context_set_pre_touch_mapped_memory(aeron_context_t *context, bool value);
int aeron_context_set_use_conductor_agent_invoker(aeron_context_t *context, bool value);
int aeron_init(aeron_t **client, aeron_context_t *context);
int aeron_start(aeron_t *client);
int aeron_main_do_work(aeron_t *client);
int aeron_close(aeron_t *client);
bool aeron_is_closed(aeron_t *client);

/* client: exclusive publications */
typedef struct aeron_async_add_exclusive_publication_stct aeron_async_add_exclusive_publication_t;
typedef struct aeron_exclusive_publication_stct aeron_exclusive_publication_t;
typedef struct aeron_publication_constants_stct
{
    const char *channel;
    int64_t original_registration_id;
    int64_t registration_id;
    int64_t max_possible_position;
    size_t position_bits_to_shift;
    size_t term_buffer_length;
    size_t max_message_length;
    size_t max_payload_length;
    int32_t stream_id;
    int32_t session_id;
    int32_t initial_term_id;
    int32_t publication_limit_counter_id;
    int32_t channel_status_indicator_id;
}
aeron_publication_constants_t;
int aeron_async_add_exclusive_publication(
    aeron_async_add_exclusive_publication_t **async, aeron_t *client, const char *uri, int32_t stream_id);
int aeron_async_add_exclusive_publication_poll(
    aeron_exclusive_publication_t **publication, aeron_async_add_exclusive_publication_t *async);
int64_t aeron_exclusive_publication_offer(
    aeron_exclusive_publication_t *publication,
    const uint8_t *buffer,
    size_t length,
    void *reserved_value_supplier,
    void *clientd);
bool aeron_exclusive_publication_is_connected(aeron_exclusive_publication_t *publication);
int aeron_exclusive_publication_constants(
    aeron_exclusive_publication_t *publication, aeron_publication_constants_t *constants);
int aeron_exclusive_publication_revoke(
    aeron_exclusive_publication_t *publication, void *on_close_complete, void *clientd);

/* client: subscriptions */
typedef struct aeron_async_add_subscription_stct aeron_async_add_subscription_t;
typedef struct aeron_subscription_stct aeron_subscription_t;
typedef struct aeron_header_stct aeron_header_t;
typedef void (*aeron_fragment_handler_t)(
    void *clientd, const uint8_t *buffer, size_t length, aeron_header_t *header);
int aeron_async_add_subscription(
    aeron_async_add_subscription_t **async,
    aeron_t *client,
    const char *uri,
    int32_t stream_id,
    void *on_available_image,
    void *on_available_image_clientd,
    void *on_unavailable_image,
    void *on_unavailable_image_clientd);
int aeron_async_add_subscription_poll(
    aeron_subscription_t **subscription, aeron_async_add_subscription_t *async);
int aeron_subscription_poll(
    aeron_subscription_t *subscription, aeron_fragment_handler_t handler, void *clientd, size_t fragment_limit);
int aeron_subscription_controlled_poll(
    aeron_subscription_t *subscription, void *handler, void *clientd, size_t fragment_limit);
int aeron_subscription_close(
    aeron_subscription_t *subscription, void *on_close_complete, void *clientd);
int aeron_header_values(aeron_header_t *header, void *values);  /* 44 packed bytes */

/* client: counters */
typedef struct aeron_counters_reader_stct aeron_counters_reader_t;
aeron_counters_reader_t *aeron_counters_reader(aeron_t *client);
int64_t *aeron_counters_reader_addr(aeron_counters_reader_t *reader, int32_t counter_id);

/* media driver */
typedef struct aeron_driver_context_stct aeron_driver_context_t;
typedef struct aeron_driver_stct aeron_driver_t;
int aeron_driver_context_init(aeron_driver_context_t **context);
int aeron_driver_context_close(aeron_driver_context_t *context);
int aeron_driver_init(aeron_driver_t **driver, aeron_driver_context_t *context);
int aeron_driver_start(aeron_driver_t *driver, bool manual_main_loop);
bool aeron_is_driver_active(const char *dirname, int64_t timeout_ms, void (*log_func)(const char *));
int aeron_driver_close(aeron_driver_t *driver);
int aeron_driver_context_set_dir(aeron_driver_context_t *context, const char *value);
int aeron_driver_context_set_dir_delete_on_start(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_dir_delete_on_shutdown(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_dir_warn_if_exists(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_threading_mode(aeron_driver_context_t *context, int32_t mode);
int aeron_driver_context_set_shared_idle_strategy_init_args(aeron_driver_context_t *context, const char *value);
int aeron_driver_context_set_shared_idle_strategy(aeron_driver_context_t *context, const char *value);
int aeron_driver_context_set_native_resource_agent_idle_strategy_init_args(
    aeron_driver_context_t *context, const char *value);
int aeron_driver_context_set_native_resource_agent_idle_strategy(
    aeron_driver_context_t *context, const char *value);
int aeron_driver_context_set_term_buffer_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_ipc_term_buffer_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_term_buffer_sparse_file(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_perform_storage_checks(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_mtu_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_socket_so_rcvbuf(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_socket_so_sndbuf(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_rcv_initial_window_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_rcv_status_message_timeout_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_image_liveness_timeout_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_client_liveness_timeout_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_publication_connection_timeout_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_publication_linger_timeout_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_publication_unblock_timeout_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_timer_interval_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_counters_buffer_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_error_buffer_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_to_conductor_buffer_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_to_clients_buffer_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_loss_report_buffer_length(aeron_driver_context_t *context, size_t value);
int aeron_driver_context_set_nak_unicast_delay_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_nak_unicast_retry_delay_ratio(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_retransmit_unicast_linger_ns(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_stream_session_limit(aeron_driver_context_t *context, int32_t value);
int aeron_driver_context_set_rejoin_stream(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_reliable_stream(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_spies_simulate_connection(aeron_driver_context_t *context, bool value);
int aeron_driver_context_set_driver_timeout_ms(aeron_driver_context_t *context, uint64_t value);
int aeron_driver_context_set_print_configuration(aeron_driver_context_t *context, bool value);
