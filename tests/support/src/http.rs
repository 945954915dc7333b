//! A small HTTP client that sends exactly the given headers, including a forged `Host`, which real clients do not
//! allow.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Longer than any page takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    /// The first header with this name, which must be in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }
}

/// Sends a request to `host:port`. `Host` is the address, unless it is among the headers.
pub async fn request(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
    let text = head(address, method, path, headers, body);
    let address = address.to_owned();
    tokio::task::spawn_blocking(move || send(&address, &text)).await.expect("the request is sent")
}

/// A connection on which a server sends events. It is closed when dropped.
pub struct EventStream(BufReader<TcpStream>);

impl EventStream {
    pub async fn open(address: &str, path: &str) -> EventStream {
        let text = head(address, "GET", path, &[("Accept", "text/event-stream")], "");
        let address = address.to_owned();
        let opened = tokio::task::spawn_blocking(move || {
            let mut stream = BufReader::new(connect(&address, &text));
            let answer = read_head(&mut stream);
            assert_eq!(answer.status, 200, "{answer:?}");
            EventStream(stream)
        });
        opened.await.expect("the stream is opened")
    }

    /// The data of the next event.
    pub async fn next(self) -> (Self, String) {
        let read = tokio::task::spawn_blocking(move || {
            let mut this = self;
            loop {
                let mut line = String::new();
                assert_ne!(this.0.read_line(&mut line).expect("the server sends events"), 0, "the stream has ended");
                if let Some(data) = line.trim_end().strip_prefix("data: ") {
                    return (this, data.to_owned());
                }
            }
        });
        read.await.expect("an event comes")
    }
}

fn head(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {}\r\n", body.len());
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        text += &format!("Host: {address}\r\n");
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    text + "\r\n" + body
}

fn connect(address: &str, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time that is not zero");
    stream.write_all(text.as_bytes()).expect("the server reads");
    stream
}

fn send(address: &str, text: &str) -> Answer {
    let mut stream = BufReader::new(connect(address, text));
    let mut answer = read_head(&mut stream);
    let mut body = Vec::new();
    let length = answer.header("content-length").and_then(|length| length.parse().ok());
    match (answer.header("transfer-encoding"), length) {
        (Some("chunked"), _) => read_chunks(&mut stream, &mut body),
        (_, Some(length)) => {
            body.resize(length, 0);
            stream.read_exact(&mut body).expect("the whole body");
        }
        (_, None) => drop(stream.read_to_end(&mut body).expect("the body")),
    }
    answer.body = String::from_utf8_lossy(&body).into_owned();
    answer
}

fn read_head(stream: &mut impl BufRead) -> Answer {
    let mut line = String::new();
    stream.read_line(&mut line).expect("an answer");
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    let mut headers = Vec::new();
    loop {
        line.clear();
        stream.read_line(&mut line).expect("a header");
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
            None => return Answer { status, headers, body: String::new() },
        }
    }
}

fn read_chunks(stream: &mut impl BufRead, body: &mut Vec<u8>) {
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).expect("a chunk");
        let length = usize::from_str_radix(line.trim(), 16).expect("the length of a chunk");
        if length == 0 {
            return;
        }
        let start = body.len();
        body.resize(start + length, 0);
        stream.read_exact(&mut body[start..]).expect("the whole chunk");
        stream.read_line(&mut line).expect("the end of a chunk");
    }
}
