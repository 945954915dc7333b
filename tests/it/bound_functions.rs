//! The SQL functions of an inbox act on that inbox, whatever the caller's search_path is, and record the caller in the
//! audit. PostgreSQL only: SQLite has neither schemas nor users.

use wharf::{Inbox, Postgres, Store};

use crate::scene::{Runs, Scene, quick, record};
use support::postgres::connect;

/// Registers the handler `stock` in the inbox of a schema, and creates that inbox if it does not exist.
async fn inbox_in(scene: &Scene, schema: &str) {
    let separator = if scene.database.url().contains('?') { '&' } else { '?' };
    let url = format!("{}{separator}options=-c%20search_path%3D{schema}", scene.database.url());
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let inbox = Inbox::builder(store).limits(quick()).subscribe("orders", Runs::new().handler("stock")).build();
    inbox.unwrap().accept(record("a")).await.unwrap();
}

/// A user with an inbox in a schema with her own name, who may act on the inbox in `public`.
async fn with_alice(scene: &Scene) -> String {
    let alice = format!("{}_alice", scene.database.name());
    scene.database.execute(&format!("CREATE ROLE {alice}; CREATE SCHEMA {alice}")).await;
    inbox_in(scene, "public").await;
    inbox_in(scene, &alice).await;
    let grants = format!(
        "GRANT USAGE ON SCHEMA public, {alice} TO {alice}; GRANT ALL ON ALL TABLES IN SCHEMA {alice} TO {alice};
         GRANT EXECUTE ON FUNCTION public.inbox_pause_handler, public.inbox_quarantine_discard TO {alice}"
    );
    scene.database.execute(&grants).await;
    alice
}

#[tokio::test(flavor = "multi_thread")]
async fn an_action_reaches_the_inbox_of_its_schema_and_the_audit_names_the_session_user() {
    let scene = Scene::new().await;
    let alice = with_alice(&scene).await;
    let session = connect(&scene.database.url()).await;
    // Her search_path is the default: "$user", public. A temporary table comes before both.
    let before = format!("SET SESSION AUTHORIZATION {alice}; CREATE TEMPORARY TABLE inbox_handler_key (key text)");
    session.batch_execute(&before).await.unwrap();

    let pause = "SELECT public.inbox_pause_handler('stock', because => 'a test', actor => 'Alice')";
    assert_eq!(session.query_one(pause, &[]).await.unwrap().get::<_, i64>(0), 1);

    let paused = |schema: &str| format!("{schema}.inbox_handler WHERE paused_at IS NOT NULL");
    assert_eq!((scene.count(&paused("public")).await, scene.count(&paused(&alice)).await), (1, 0));
    let audit = "SELECT concat_ws('|', database_user, actor, action, because) FROM public.inbox_audit";
    assert_eq!(scene.database.query_texts(audit).await, [format!("{alice}|Alice|pause|a test")]);
    let direct = session.batch_execute("UPDATE public.inbox_handler SET paused_at = NULL").await.unwrap_err();
    assert_eq!(direct.code().map(|code| code.code()), Some("42501"));
    drop(session);
    scene.database.execute(&format!("DROP OWNED BY {alice}; DROP ROLE {alice}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_function_is_bound_to_its_schema_and_no_action_is_granted_to_public() {
    let scene = Scene::new().await;
    let of_inbox = "FROM pg_proc WHERE proname LIKE 'inbox\\_%' AND pronamespace = 'public'::regnamespace";
    let unbound = format!(
        "SELECT proname::text {of_inbox} AND prosqlbody IS NULL
         AND NOT coalesce('search_path=public, pg_temp' = ANY (proconfig), false)"
    );
    assert_eq!(scene.database.query_texts(&unbound).await, [""; 0]);
    let granted =
        format!("SELECT proname::text {of_inbox} AND prosecdef AND has_function_privilege('public', oid, 'EXECUTE')");
    assert_eq!(scene.database.query_texts(&granted).await, [""; 0]);
    let actions = format!("SELECT count(*) {of_inbox} AND prosecdef");
    assert!(scene.database.query_one_i64(&actions).await >= 8);
}
