// Load generator that spends a few microseconds per message, so that it does not limit what it measures.
//
// client grpc|sse HOST PORT CONNECTIONS CONCURRENCY TOKENS BODIES_FILE
//
// BODIES_FILE holds request bodies, each preceded by its length (32 bits, little endian): GenerateRequest messages, or
// JSON for POST /v1/completions. Every body is sent once, CONCURRENCY at a time. A request fails unless it returns
// exactly TOKENS tokens and ends regularly. Prints one JSON object. HTTP/2 is spoken over plain text, and only as far
// as a well-behaved server needs: no HPACK decoding (a status other than OK shows as missing tokens) and no padding.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Totals {
  std::vector<std::string> bodies;
  size_t next = 0, done = 0, failed = 0;
  uint64_t tokens = 0, messages = 0;
  uint64_t expected = 0;
  std::vector<float> gaps_ms, first_ms;
  size_t running = 0, concurrency = 0;
};

struct Stream {
  double started = 0, last = 0;
  uint64_t tokens = 0;
  std::string data;

  void arrived(Totals& totals, uint64_t count, double now) {
    totals.messages++;
    totals.tokens += count;
    if (tokens == 0) totals.first_ms.push_back(1000 * (now - started));
    else totals.gaps_ms.push_back(1000 * (now - last));
    tokens += count;
    last = now;
  }
};

void end_request(Totals& totals, bool is_regular) {
  totals.done++;
  totals.running--;
  if (!is_regular) totals.failed++;
}

class Connection {
 public:
  Connection(const char* host, int port) {
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    inet_pton(AF_INET, host, &address.sin_addr);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address)) {
      perror("connect");
      exit(1);
    }
    int one = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd_, F_SETFL, O_NONBLOCK);
  }
  virtual ~Connection() { close(fd_); }
  virtual void start(Totals& totals) = 0;
  virtual void take(Totals& totals, double now) = 0;
  virtual size_t abandon() = 0;

  int fd() const { return fd_; }
  bool wants_to_write() const { return !out_.empty(); }
  bool is_closed() const { return is_closed_; }

  void read_some(Totals& totals) {
    char buffer[1 << 16];
    ssize_t count = recv(fd_, buffer, sizeof buffer, 0);
    if (count == 0 || (count < 0 && errno != EAGAIN)) is_closed_ = true;
    if (count > 0) in_.append(buffer, count);
    take(totals, now_s());
  }

  void write_some() {
    while (!out_.empty()) {
      ssize_t count = send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL);
      if (count < 0) {
        if (errno != EAGAIN) is_closed_ = true;
        return;
      }
      out_.erase(0, count);
    }
  }

 protected:
  int fd_;
  bool is_closed_ = false;
  std::string in_, out_;
};

class Http2 : public Connection {
 public:
  Http2(const char* host, int port) : Connection(host, port) {
    out_ = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    std::string settings;
    setting(settings, 2, 0);           // disable server push
    setting(settings, 4, 0x7fffffff);  // stream window
    frame(4, 0, 0, settings);
    frame(8, 0, 0, number(0x7fffffff - 65535));  // connection window
    field(headers_, ":method", "POST");
    field(headers_, ":scheme", "http");
    field(headers_, ":path", "/midstream.v1.Midstream/Generate");
    field(headers_, ":authority", host);
    field(headers_, "content-type", "application/grpc");
    field(headers_, "te", "trailers");
  }

  void start(Totals& totals) override {
    waiting_.push_back(totals.bodies[totals.next++]);
    totals.running++;
    send_waiting();
  }

  size_t abandon() override { return streams_.size() + waiting_.size(); }

  void take(Totals& totals, double now) override {
    size_t at = 0;
    while (in_.size() - at >= 9) {
      auto* head = reinterpret_cast<const unsigned char*>(in_.data() + at);
      size_t length = head[0] << 16 | head[1] << 8 | head[2];
      if (in_.size() - at < 9 + length) break;
      int type = head[3], flags = head[4];
      uint32_t id = (head[5] & 0x7f) << 24 | head[6] << 16 | head[7] << 8 | head[8];
      obey(totals, now, type, flags, id, in_.data() + at + 9, length);
      at += 9 + length;
    }
    in_.erase(0, at);
    send_waiting();
  }

 private:
  static std::string number(uint32_t value) {
    unsigned char bytes[] = {(unsigned char)(value >> 24), (unsigned char)(value >> 16), (unsigned char)(value >> 8),
                             (unsigned char)value};
    return std::string(reinterpret_cast<char*>(bytes), 4);
  }
  static void setting(std::string& out, int id, uint32_t value) {
    out.push_back(0);
    out.push_back(id);
    out += number(value);
  }
  static void field(std::string& out, const std::string& name, const std::string& value) {
    out.push_back(0);  // literal header, not indexed
    out.push_back(name.size());
    out += name;
    out.push_back(value.size());
    out += value;
  }

  void frame(int type, int flags, uint32_t id, const std::string& payload) {
    out_.push_back(payload.size() >> 16);
    out_.push_back(payload.size() >> 8);
    out_.push_back(payload.size());
    out_.push_back(type);
    out_.push_back(flags);
    out_ += number(id);
    out_ += payload;
  }

  void send_waiting() {
    // A body is smaller than the first window of a stream, which is 65,535 bytes.
    while (!waiting_.empty() && int64_t(waiting_.front().size()) + 5 <= window_) {
      const std::string& body = waiting_.front();
      frame(1, 4, next_id_, headers_);
      std::string message;
      message.push_back(0);
      message += number(body.size());
      message += body;
      for (size_t at = 0; at < message.size(); at += 16384) {
        frame(0, at + 16384 >= message.size(), next_id_, message.substr(at, 16384));
      }
      window_ -= message.size();
      streams_[next_id_].started = now_s();
      next_id_ += 2;
      waiting_.pop_front();
    }
  }

  void obey(Totals& totals, double now, int type, int flags, uint32_t id, const char* data, size_t length) {
    if (type == 4 && !(flags & 1)) frame(4, 1, 0, "");
    if (type == 6 && !(flags & 1)) frame(6, 1, 0, std::string(data, length));
    if (type == 7) is_closed_ = true;
    if (type == 8 && id == 0) {
      auto* bytes = reinterpret_cast<const unsigned char*>(data);
      window_ += (bytes[0] & 0x7f) << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
    }
    auto found = streams_.find(id);
    if (found == streams_.end()) return;
    Stream& stream = found->second;
    if (type == 0) {
      stream.data.append(data, length);
      take_messages(totals, stream, now);
    }
    bool has_ended = (type == 0 || type == 1) && (flags & 1);
    if (has_ended || type == 3) {
      end_request(totals, has_ended && stream.tokens == totals.expected);
      streams_.erase(found);
    }
  }

  static void take_messages(Totals& totals, Stream& stream, double now) {
    size_t at = 0;
    while (stream.data.size() - at >= 5) {
      auto* head = reinterpret_cast<const unsigned char*>(stream.data.data() + at);
      size_t length = (size_t)head[1] << 24 | head[2] << 16 | head[3] << 8 | head[4];
      if (stream.data.size() - at < 5 + length) break;
      uint64_t count = num_tokens(head + 5, head + 5 + length);
      if (count) stream.arrived(totals, count, now);
      at += 5 + length;
    }
    stream.data.erase(0, at);
  }

  static uint64_t varint(const unsigned char*& at, const unsigned char* end) {
    uint64_t value = 0;
    for (int shift = 0; at < end && shift < 64; shift += 7) {
      unsigned char byte = *at++;
      value |= uint64_t(byte & 0x7f) << shift;
      if (byte < 128) break;
    }
    return value;
  }

  // Length of GenerateResponse.token_ids (field 4, packed).
  static uint64_t num_tokens(const unsigned char* at, const unsigned char* end) {
    uint64_t count = 0;
    while (at < end) {
      uint64_t key = varint(at, end);
      if ((key & 7) == 0) varint(at, end);
      else if ((key & 7) == 1) at += 8;
      else if ((key & 7) == 5) at += 4;
      else {
        uint64_t length = varint(at, end);
        if (key >> 3 == 4) {
          for (auto* byte = at; byte < at + length && byte < end; byte++) count += *byte < 128;
        }
        at += length;
      }
    }
    return count;
  }

  std::string headers_;
  int64_t window_ = 65535;
  uint32_t next_id_ = 1;
  std::deque<std::string> waiting_;
  std::unordered_map<uint32_t, Stream> streams_;
};

// Sends one request at a time and reads server-sent events in chunks.
class Sse : public Connection {
 public:
  Sse(const char* host, int port) : Connection(host, port), host_(host) {}

  void start(Totals& totals) override {
    const std::string& body = totals.bodies[totals.next++];
    totals.running++;
    stream_ = Stream{};
    stream_.started = now_s();
    is_busy_ = true;
    out_ += "POST /v1/completions HTTP/1.1\r\nHost: " + host_ +
            "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }

  bool is_busy() const { return is_busy_; }
  size_t abandon() override { return is_busy_; }

  void take(Totals& totals, double now) override {
    // Reads whole lines only. The end of a chunk never splits a relevant line, since each event is written at once.
    size_t at = 0, end;
    while (is_busy_ && (end = in_.find('\n', at)) != std::string::npos) {
      std::string line = in_.substr(at, end - at);
      at = end + 1;
      if (line.rfind("data: [DONE]", 0) == 0) is_last_ = true;
      else if (line.rfind("data: {", 0) == 0) event(totals, line, now);
      else if (line == "0\r") {
        at = std::min(at + 2, in_.size());
        is_busy_ = false;
        end_request(totals, is_last_ && usage_ == totals.expected);
        totals.tokens += usage_;
        is_last_ = false;
        usage_ = 0;
      }
    }
    in_.erase(0, at);
  }

 private:
  void event(Totals& totals, const std::string& line, double now) {
    static const std::string key = "\"completion_tokens\":";
    size_t found = line.find(key);
    if (found != std::string::npos) usage_ = strtoull(line.c_str() + found + key.size(), nullptr, 10);
    uint64_t before = totals.tokens;
    stream_.arrived(totals, 1, now);
    totals.tokens = before;  // counted from the usage at the end
  }

  std::string host_;
  Stream stream_;
  bool is_busy_ = false, is_last_ = false;
  uint64_t usage_ = 0;
};

float quantile(std::vector<float>& values, double share) {
  if (values.empty()) return 0;
  size_t place = std::min(values.size() - 1, size_t(share * values.size()));
  std::nth_element(values.begin(), values.begin() + place, values.end());
  return values[place];
}

std::vector<std::string> read_bodies(const char* path) {
  std::vector<std::string> bodies;
  FILE* file = fopen(path, "rb");
  uint32_t length;
  while (file && fread(&length, 4, 1, file) == 1) {
    std::string body(length, 0);
    if (fread(body.data(), 1, length, file) != length) break;
    bodies.push_back(body);
  }
  if (file) fclose(file);
  return bodies;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 8) return fprintf(stderr, "usage: client grpc|sse HOST PORT CONNECTIONS CONCURRENCY TOKENS FILE\n"), 2;
  bool is_grpc = !strcmp(arguments[1], "grpc");
  Totals totals;
  totals.bodies = read_bodies(arguments[7]);
  totals.concurrency = atoi(arguments[5]);
  totals.expected = atoi(arguments[6]);
  std::vector<Connection*> connections;
  for (int i = 0; i < atoi(arguments[4]); i++) {
    if (is_grpc) connections.push_back(new Http2(arguments[2], atoi(arguments[3])));
    else connections.push_back(new Sse(arguments[2], atoi(arguments[3])));
  }
  double begin = now_s();
  size_t turn = 0;
  std::vector<pollfd> polls(connections.size());
  while (totals.done < totals.bodies.size()) {
    for (size_t tries = 0; tries < connections.size() && totals.next < totals.bodies.size() &&
                           totals.running < totals.concurrency;) {
      Connection* connection = connections[turn++ % connections.size()];
      bool is_taken = connection->is_closed() || (!is_grpc && static_cast<Sse*>(connection)->is_busy());
      if (is_taken) tries++;
      else connection->start(totals), tries = 0;
    }
    bool is_alive = false;
    for (size_t i = 0; i < connections.size(); i++) {
      connections[i]->write_some();
      bool is_open = !connections[i]->is_closed();
      is_alive |= is_open;
      polls[i] = {is_open ? connections[i]->fd() : -1,
                  short(POLLIN | (connections[i]->wants_to_write() ? POLLOUT : 0)), 0};
    }
    if (!is_alive) break;
    if (poll(polls.data(), polls.size(), 60000) == 0) break;
    for (size_t i = 0; i < connections.size(); i++) {
      if (polls[i].revents & (POLLIN | POLLHUP | POLLERR)) connections[i]->read_some(totals);
    }
  }
  double seconds = now_s() - begin;
  totals.failed += totals.bodies.size() - totals.done;
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  double cpu = usage.ru_utime.tv_sec + usage.ru_stime.tv_sec + 1e-6 * (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
  printf("{\"seconds\": %.6f, \"requests\": %zu, \"failed\": %zu, \"tokens\": %llu, \"messages\": %llu, "
         "\"gap_p50_ms\": %.3f, \"gap_p99_ms\": %.3f, \"first_p50_ms\": %.3f, \"cpu_s\": %.4f}\n",
         seconds, totals.bodies.size(), totals.failed, (unsigned long long)totals.tokens,
         (unsigned long long)totals.messages, quantile(totals.gaps_ms, 0.5), quantile(totals.gaps_ms, 0.99),
         quantile(totals.first_ms, 0.5), cpu);
}
